"""Chat with a main model whose tokens a draft model proposes, and see which of them were the draft's.

    python samples/speculative_chat.py models/embedded/main models/embedded/draft

Answers stream to standard output, all else goes to standard error, so it works in a pipe too. Greedy. Ctrl-C stops
an answer; at the prompt it ends the chat, as /quit and Ctrl-D do.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import console
import openvino_genai

with contextlib.suppress(ImportError):  # line editing and history; Windows consoles have their own
    import readline  # noqa: F401

COMMANDS = """\
/k [N]                  show or set how many tokens are drafted for one inference of the main model
/tokens [N]             show or set the longest answer, in tokens
/speculation [on|off]   show or switch drafting, to compare (off loads the main model a second time, alone)
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
    def __init__(self, args, pipe):
        self.args = args
        self.pipe = pipe
        self.main_alone = None  # loaded when speculation is switched off
        self.speculation = True
        self.history = openvino_genai.ChatHistory()
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def answer(self, question):
        self.history.append({"role": "user", "content": question})
        pipe = self.pipe if self.speculation else self.main_alone
        prompt = pipe.get_tokenizer().apply_chat_template(self.history, add_generation_prompt=True)
        room = console.room_in_context(self.args.main, pipe.get_tokenizer(), prompt)
        if room < 1:
            self.history.pop()
            console.say(f"The conversation fills the context of {self.args.main}: /reset forgets it.")
            return

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = min(self.args.max_new_tokens, room)
        if self.speculation:
            config.num_assistant_tokens = self.args.num_assistant_tokens

        kind = ColouringStreamer if self.colour else console.Streamer
        streamer = kind(self.args.main, pipe.get_tokenizer())
        console.ctrl_c.streaming = True  # while the prompt is read, too
        result = pipe.generate(self.history, config, streamer)
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

    def command(self, line):
        """Obey one command and say what holds now. An unknown command or value changes nothing."""
        name, _, value = line.partition(" ")
        value = value.strip()
        try:
            if name == "/k":
                limit = console.max_draft_length(self.args.device)
                self.args.num_assistant_tokens = number(value, limit, self.args.num_assistant_tokens)
                console.say(f"K = {self.args.num_assistant_tokens} draft tokens")
            elif name == "/tokens":
                self.args.max_new_tokens = number(value, console.MAX_NEW_TOKENS, self.args.max_new_tokens)
                console.say(f"answers of at most {self.args.max_new_tokens} tokens")
            elif name == "/speculation":
                self.speculation = switch(value, self.speculation)
                if not self.speculation and not self.main_alone:
                    self.load_main_alone()
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

    def load_main_alone(self):
        """A pipeline made with a draft model always drafts (num_assistant_tokens = 0 means 5), so load another."""
        size = Path(self.args.main, "openvino_model.bin").stat().st_size
        console.say(f"Loading {self.args.main} a second time, without the draft: {size / 1e6:.0f} MB more memory ...")
        self.main_alone = openvino_genai.LLMPipeline(self.args.main, self.args.device, **self.args.property)


def number(text, limit, current):
    return console.whole_number(1, limit)(text) if text else current


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
        "--num-assistant-tokens",
        "--max-new-tokens",
        "--property",
        "--draft-property",
    )

    draft = openvino_genai.draft_model(args.draft, args.draft_device, **args.draft_property)
    pipe = openvino_genai.LLMPipeline(args.main, args.device, draft_model=draft, **args.property)
    if not pipe.get_tokenizer().chat_template:
        console.fail(f"{args.main} has no chat template: chat with an instruct model.")

    if os.name == "nt":
        os.system("")  # lets older Windows consoles show colours
    chat = Chat(args, pipe)
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
