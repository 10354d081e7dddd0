"""Chat with a main model whose tokens a draft model proposes, and see which of them were the draft's.

    python samples/speculative_chat.py models/embedded/main models/embedded/draft

Greedy, or drawn if a --temperature is set, and lossless either way. Both come from `speculative/decoder.py`, since
GenAI's pipeline draws from another distribution when it samples with a draft model: one engine for both keeps each
model in memory once. An answer computes only what is new in the conversation.
Answers stream to standard output, all else goes to standard error, so it works in a pipe too. Ctrl-C stops an
answer; at the prompt it ends the chat, as /quit and Ctrl-D do.
"""

import argparse
import contextlib
import os
import sys

import console
import openvino_genai

from speculative import decoder
from speculative.drafting.policy import ConfidenceDraftLength, FixedDraftLength

with contextlib.suppress(ImportError):  # line editing and history; Windows consoles have their own
    import readline  # noqa: F401

COMMANDS = """\
/k [N|auto|0.4]         show or set how many tokens are drafted for one inference of the main model: N, what pays,
                        or until the draft is less sure than that
/temperature [T]        show or set it: 0 is greedy, above it answers are drawn
/tokens [N]             show or set the longest answer, in tokens
/speculation [on|off]   show or switch drafting, to compare
/colour [on|off]        show or switch the colour of accepted draft tokens
/reset                  forget the conversation
/help                   this list
/quit                   end"""
GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouringStreamer(console.Streamer):
    """Print tokens that the draft proposed in green: all that an inference gained but the last, which is the main's."""

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
        """From here on a drawn answer depends on the conversation and the seed alone."""
        self.args.temperature = temperature
        self.engine.reset(self.args.seed if temperature else None)

    def answer(self, question):
        self.history.append({"role": "user", "content": question})
        room = self.engine.main.capacity - len(self.engine.encode(self.history))
        if room < 1:
            self.history.pop()
            console.say(f"The conversation fills the context of {self.args.main}: /reset forgets it.")
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
        console.ctrl_c.streaming = True  # while the prompt is read, too
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
        """Obey one command and say what holds now. An unknown command or value changes nothing."""
        name, _, value = line.partition(" ")
        value = value.strip()
        try:
            if name == "/k":
                if value:
                    console.set_draft_length(self.args, console.draft_length(value))
                k = self.args.num_assistant_tokens or self.args.assistant_confidence_threshold or "auto"
                console.say(f"K = {k}: {self.draft_length().why()}")
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
                console.say("conversation forgotten")
            elif name == "/help":
                console.say(COMMANDS)
            else:
                console.say(f"there is no command {name}: /help lists them")
        except argparse.ArgumentTypeError as error:
            console.say(f"{name}: {error}")


def switch(text, current):
    if text not in ("", "on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on" if text else current


def main():
    args = console.parse_arguments(
        __doc__,
        "main",
        "draft",
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
    )

    engine = decoder.load(args.main, args.device, args.draft, args.draft_device, args.property, args.draft_property)
    if not engine.tokenizer.chat_template:
        console.fail(f"{args.main} has no chat template: chat with an instruct model.")

    if os.name == "nt":
        os.system("")  # lets older Windows consoles show colours
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
