"""Chat with speculative decoding, with accepted draft tokens in colour.

    python samples/speculative_chat.py models/embedded/main models/embedded/draft
    python samples/speculative_chat.py models/smollm2-135m/main models/smollm2-135m/draft

Without a draft model, draft tokens are copied from the conversation so far (suffix decoding); with --suffix-decoding
they come from both. Without a draft model and with --no-suffix-decoding, the main model decodes alone.
Greedy, or sampled if --temperature is set, and lossless either way. Both use `speculative/decoder.py`, because GenAI's
pipeline samples from a wrong distribution with a draft model, and one engine for both keeps each model in memory once.
Each answer computes only the new tokens of the conversation.
Answers stream to standard output, everything else goes to standard error, so the chat works in a pipe too. Ctrl-C stops
an answer; at the prompt it ends the chat, like /quit and Ctrl-D.
"""

import argparse
import contextlib
import os
import sys

import console
import openvino_genai

from speculative import ModelSpec, load
from speculative.drafting.policy import ConfidenceDraftLength, FixedDraftLength
from speculative.drafting.suffix import LONGEST_MATCH

with contextlib.suppress(ImportError):  # line editing and history; Windows consoles have their own
    import readline  # noqa: F401

COMMANDS = """\
/k [N|auto|0.4]         show or set the draft length: fixed (N), adaptive (auto), or until the draft's confidence falls
                        below a threshold (0.4)
/temperature [T]        show or set the temperature; 0 is greedy
/tokens [N]             show or set the longest answer, in tokens
/speculation [on|off]   show or switch drafting, to compare
/colour [on|off]        show or switch the colour of accepted draft tokens
/reset                  clear the conversation
/help                   show this list
/quit                   end the chat"""
GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouringStreamer(console.Streamer):
    """Prints draft tokens in green: all new tokens of a forward pass but the last, which is the main model's."""

    def show(self, tokens):
        for i, token in enumerate(tokens):
            text = self.text_of([token])
            self.print(f"{GREEN}{text}{PLAIN}" if text and i < len(tokens) - 1 else text)


class Chat:
    def __init__(self, args, engine):
        self.args = args
        self.engine = engine
        self.adaptive = engine.draft_length
        self.speculation = True
        self.history = []
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.set_temperature(args.temperature)

    def set_temperature(self, temperature):
        """Set the temperature and reset the engine, so that sampled answers depend on conversation and seed only."""
        self.args.temperature = temperature
        self.engine.reset(self.args.seed if temperature else None)

    def answer(self, question):
        self.history.append({"role": "user", "content": question})
        try:
            room = self.engine.main.capacity - len(self.engine.encode(self.history))
        except ValueError:  # more tokens than the tokenizer takes
            room = 0
        if room < 1:
            self.history.pop()
            console.say(f"The conversation fills the context of {self.args.main}: /reset clears it.")
            return

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = min(self.args.max_new_tokens, room)
        config.do_sample = True
        config.temperature = self.args.temperature
        config.top_k = self.args.top_k
        config.top_p = self.args.top_p
        self.engine.draft_length = self.draft_length() if self.speculation else FixedDraftLength(0)

        kind = ColouringStreamer if self.colour else console.Streamer
        streamer = kind(self.args.main, self.engine.tokenizer)
        console.ctrl_c.streaming = True  # during prefill, too
        result = self.engine.generate(self.history, config, streamer)
        self.history.append({"role": "assistant", "content": streamer.text})
        print(flush=True)
        try:
            streamer.check()
        except KeyboardInterrupt:
            console.say("(stopped)")
            return
        figures = console.figures(self.args, config, streamer, result)
        wanted = ("new tokens", "throughput", "block efficiency", "acceptance rate")
        console.say("(" + ", ".join(f"{name} {figures[name]}" for name in wanted if name in figures) + ")")

    def draft_length(self):
        k, threshold = self.args.num_assistant_tokens, self.args.assistant_confidence_threshold
        return FixedDraftLength(k) if k else ConfidenceDraftLength(threshold) if threshold else self.adaptive

    def command(self, line):
        """Execute a command and print the new setting. An unknown command or value changes nothing."""
        name, _, value = line.partition(" ")
        value = value.strip()
        try:
            if name == "/k":
                if value:
                    console.set_draft_length(self.args, console.draft_length(value))
                k = self.args.num_assistant_tokens or self.args.assistant_confidence_threshold or "auto"
                console.say(f"K = {k}: {self.draft_length().describe()}")
            elif name == "/temperature":
                if value:
                    self.set_temperature(console.temperature(value))
                console.say(f"sampling: {console.sampling(self.args)}")
            elif name == "/tokens":
                if value:
                    self.args.max_new_tokens = console.whole_number(1, console.MAX_NEW_TOKENS)(value)
                console.say(f"answers of at most {self.args.max_new_tokens} tokens")
            elif name == "/speculation":
                self.speculation = switch(value, self.speculation)
                console.say(f"speculation {'on' if self.speculation else 'off'}")
            elif name == "/colour":
                self.colour = switch(value, self.colour)
                console.say(f"colour {'on: the draft in ' + GREEN + 'green' + PLAIN if self.colour else 'off'}")
            elif name == "/reset":
                self.history.clear()
                console.say("conversation cleared")
            elif name == "/help":
                console.say(COMMANDS)
            else:
                console.say(f"there is no command {name}: /help lists them")
        except argparse.ArgumentTypeError as error:
            console.say(f"{name}: {error}")


def switch(text, current):
    if text not in ("", "on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is not on or off")
    return text == "on" if text else current


def main():
    args = console.parse_arguments(
        __doc__,
        "main",
        "[draft]",
        "--device",
        "--draft-device",
        "-k",
        "--temperature=0",
        "--top-k",
        "--top-p",
        "--seed",
        "--max-new-tokens",
        "--property",
        "--draft-property",
        "--recommended",
        "--suffix-decoding",
    )

    if not sys.stdin:
        console.fail("standard input is closed: run the chat in a terminal, or with lines to answer.")
    main_model = ModelSpec(args.main, args.device, args.property)
    draft_model = ModelSpec(args.draft, args.draft_device, args.draft_property) if "draft" in args else None
    copies = not draft_model if args.suffix_decoding is None else args.suffix_decoding
    engine = load(main_model, draft_model, max_ngram_size=LONGEST_MATCH if copies else None)
    if not engine.tokenizer.chat_template:
        console.fail(f"{args.main} has no chat template: use an instruct model.")

    if os.name == "nt":
        os.system("")  # enables colours in older Windows consoles
    chat = Chat(args, engine)
    if args.temperature:
        chat.command("/temperature")
    if args.recommended:
        console.say(f"Settings: recommended {args.recommended}")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        console.say("/help lists the commands.")
    with contextlib.suppress(EOFError):
        while (line := console.ctrl_c.input("> " if at_terminal else "").strip()) != "/quit":
            if line.startswith("/"):
                chat.command(line)
            elif line:
                chat.answer(line)


if __name__ == "__main__":
    console.run(main)
