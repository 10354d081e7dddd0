"""The chat sample, in a pseudo-terminal and through a pipe."""

import contextlib
import json
import os
import re
import select
import shutil
import sys
import time

import openvino_genai
import pytest

from speculative import decoder
from speculative.models.spec import ModelSpec
from tests.support.cutting_tokenizer import cutting_tokenizer
from tests.support.paths import DRAFT, ROOT
from tests.support.useless_draft import save_useless_draft
from tests.support.waiting import PATIENCE

CHAT = "samples/speculative_chat.py"
SMALL = DRAFT  # the embedded draft serves as the main model, because it is fast
EXACT = ("--property", "EXECUTION_MODE_HINT=ACCURACY")
TOKENS = 24
QUESTIONS = ["Write a function that reads a file.", "Now 你好 🙂"]
GREEN, PLAIN = "\033[32m", "\033[0m"

needs_terminal = pytest.mark.posix("pseudo-terminals are a POSIX thing")


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    """The small model with a chat template, and next to it a folder `draft`: a draft with half of its tokens right."""
    folder = tmp_path_factory.mktemp("chat") / "main"
    shutil.copytree(SMALL, folder)
    save_useless_draft(folder.parent / "draft", share=0.05)
    if not openvino_genai.Tokenizer(folder).chat_template:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["chat_template"] = (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class Steps(openvino_genai.StreamerBase):
    """Collects the tokens of each forward pass of the main model."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def write(self, tokens):
        self.steps.append(tokens)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


@pytest.fixture(scope="module")
def answers(main):
    """The greedy answers to QUESTIONS, and the first one coloured by hand, straight from GenAI's pipeline (K = 5)."""
    draft = openvino_genai.draft_model(main.parent / "draft", "CPU", EXECUTION_MODE_HINT="ACCURACY")
    pipe = openvino_genai.LLMPipeline(main, "CPU", draft_model=draft, EXECUTION_MODE_HINT="ACCURACY")
    config = openvino_genai.GenerationConfig(max_new_tokens=TOKENS, num_assistant_tokens=5)
    history, texts, coloured = openvino_genai.ChatHistory(), [], ""
    for question in QUESTIONS:
        streamer = Steps()
        history.append({"role": "user", "content": question})
        texts.append(pipe.generate(history, config, streamer).texts[0])
        history.append({"role": "assistant", "content": texts[-1]})
        if not coloured:
            decode = pipe.get_tokenizer().decode
            for *drafted, own in streamer.steps:
                pieces = [decode([token]) for token in drafted]
                coloured += "".join(f"{GREEN}{piece}{PLAIN}" if piece else "" for piece in pieces) + decode([own])
    return texts, coloured


@pytest.fixture(scope="module")
def engine(main):
    return decoder.load(ModelSpec(main, properties={"EXECUTION_MODE_HINT": "ACCURACY"}), main.parent / "draft")


def sampled_config(temperature):
    return openvino_genai.GenerationConfig(
        max_new_tokens=TOKENS, num_assistant_tokens=3, do_sample=True, temperature=temperature
    )


# ---- through a pipe -------------------------------------------------------------------------------------------------


def chat(run, main, *lines, options=()):
    options = ("--max-new-tokens", TOKENS, *EXACT, *options)
    return run(CHAT, main, main.parent / "draft", *options, stdin="".join(f"{x}\n" for x in lines))


def test_pipe_receives_only_answers_and_history_is_kept(run, main, answers):
    done = chat(run, main, *QUESTIONS, options=("-k", 3))  # fixed, so that each answer has drafts on any machine
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in answers[0])
    assert len(re.findall(r"^\(new tokens \d+, throughput .*acceptance rate .*\)$", done.stderr, re.MULTILINE)) == 2


def test_prompt_lookup_drafts_without_a_draft_model(run_here, main, answers):
    lines = "".join(f"{line}\n" for line in QUESTIONS)
    done = run_here(CHAT, main, "--max-new-tokens", TOKENS, *EXACT, "-k", 3, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in answers[0])
    assert f"Loading {main} on CPU" in done.stderr and "acceptance rate" in done.stderr


def test_reset_clears_the_conversation(run_here, main, answers):
    done = chat(run_here, main, QUESTIONS[1], "/reset", QUESTIONS[0])
    assert done.stdout.endswith(answers[0][0] + "\n")
    assert "conversation cleared" in done.stderr


def test_speculation_off_gives_same_text_without_drafts(run_here, main, answers):
    done = chat(run_here, main, "/speculation off", QUESTIONS[0], "/reset", "/speculation on", "/k 3", QUESTIONS[0])
    assert done.stdout == f"{answers[0][0]}\n" * 2
    without, drafting = re.findall(r"^\(new tokens.*\)$", done.stderr, re.MULTILINE)
    assert "block efficiency 1.00" in without
    assert "acceptance rate" not in without
    assert "acceptance rate" in drafting


def test_k_and_tokens_commands_show_set_and_validate(run_here, main):
    lines = ["/k", "/k 2", "/k 0", "/k 65", "/k", "/k auto", "/tokens", "/tokens 3", "/tokens no", QUESTIONS[0]]
    shown = chat(run_here, main, *lines).stderr
    assert re.findall(r"^K = (\w+): .* draft tokens?", shown, re.MULTILINE) == ["auto", "2", "2", "auto"]
    assert "/k: '0' is not a whole number from 1 to 64, nor auto" in shown
    assert "/k: '65' is not" in shown
    assert re.findall(r"at most (\d+) tokens", shown) == [str(TOKENS), "3"]
    assert "/tokens: 'no' is not" in shown
    assert "(new tokens 3," in shown


def test_sampled_answers_are_reproduced_by_the_seed(run_here, main, engine):
    history, expected = [], []
    turns = [(0.9, QUESTIONS[0]), (0.9, QUESTIONS[1]), (0, QUESTIONS[0]), (1.1, QUESTIONS[1])]
    for i, (temperature, question) in enumerate(turns):
        if i == 2:
            history = []
        if i != 1:
            engine.reset(seed=3)
        history.append({"role": "user", "content": question})
        expected.append(engine.generate(history, sampled_config(temperature)))
        history.append({"role": "assistant", "content": expected[-1].text})

    lines = [*QUESTIONS, "/reset", "/temperature 0", QUESTIONS[0], "/temperature -1", "/temperature 1.1", QUESTIONS[1]]
    done = chat(run_here, main, *lines, options=("-k", 3, "--temperature", 0.9, "--seed", 3))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer.text}\n" for answer in expected)
    assert re.findall(r"^sampling: (.*)$", done.stderr, re.MULTILINE) == [
        "temperature 0.9, top-k all, top-p 1, seed 3",
        "greedy (temperature 0)",
        "temperature 1.1, top-k all, top-p 1, seed 3",
    ]
    assert "/temperature: '-1' is not a number of 0 or more" in done.stderr
    accepted = re.findall(r"acceptance rate [\d.]+ \((\d+) of (\d+) draft tokens\)", done.stderr)
    assert accepted == [(str(sum(answer.from_draft)), str(sum(answer.proposed))) for answer in expected]


def test_unknown_command_is_reported_and_help_lists_commands(run_here, main):
    done = chat(run_here, main, "/nonsense", "/colour maybe", "/help", "/quit", QUESTIONS[0])
    assert "there is no command /nonsense: /help lists them" in done.stderr
    assert "/colour: 'maybe' is not on or off" in done.stderr
    for command in ("/k", "/temperature", "/tokens", "/speculation", "/colour", "/reset", "/help", "/quit"):
        assert re.search(rf"^{command}\b", done.stderr, re.MULTILINE)
    assert done.stdout == ""  # nothing is answered after /quit
    assert done.returncode == 0


def test_full_context_is_reported_and_chat_continues(run_here, main, answers):
    done = chat(run_here, main, "word " * 3000, QUESTIONS[0])
    assert "fills the context" in done.stderr
    assert done.stdout == answers[0][0] + "\n"


def test_conversation_truncated_by_tokenizer_is_too_long(run_here, main, answers):
    cutting_tokenizer(main, main.with_name("cutting"), 600)
    done = chat(run_here, main.with_name("cutting"), "word " * 600, QUESTIONS[0])
    assert "fills the context" in done.stderr
    assert done.stdout == answers[0][0] + "\n"


def test_main_model_without_chat_template_is_rejected(run_here, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(DRAFT, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((plain / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = (plain / "openvino_tokenizer.xml").read_text(encoding="utf-8")
    tokenizer = re.sub('<\\w*chat_template value="[^"]*" ?/>', "", tokenizer)
    (plain / "openvino_tokenizer.xml").write_text(tokenizer, encoding="utf-8")
    done = run_here(CHAT, plain, DRAFT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {plain} has no chat template: use an instruct model."


# ---- in a terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """A chat in a pseudo-terminal: input as typed, output as displayed."""

    def __init__(self, *arguments, **env):
        import pty

        self.seen = ""
        self.pid, self.file = pty.fork()  # the child's controlling terminal, so that Ctrl-C is a key
        if self.pid == 0:
            os.chdir(ROOT)
            environment = {**os.environ, "TERM": "dumb", **env}
            environment = {name: value for name, value in environment.items() if value is not None}
            os.execve(sys.executable, [sys.executable, CHAT, *map(str, arguments)], environment)

    def type(self, text):
        os.write(self.file, text.encode())

    def see(self, text, timeout=PATIENCE):
        """Wait until `text` appears and return the output before it since the last call."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            if not select.select([self.file], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not appear in {self.seen!r}")
            self.seen += self._read()
        before, self.seen = self.seen.split(text, 1)
        return before

    def _read(self):
        data = os.read(self.file, 4096)
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode()
        return (data + os.read(self.file, 3)).decode(errors="replace")

    def leave(self, again=""):
        """Return the exit status once the chat has ended, and the rest of the output.

        If nothing is shown for a while, `again` is typed: the last input may have been lost.
        """
        rest, end = self.seen, time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):  # the terminal of an ended process reads as an error
            while time.monotonic() < end:
                if not select.select([self.file], [], [], 5)[0]:
                    self.type(again)
                elif data := os.read(self.file, 4096):
                    rest += data.decode(errors="replace")
                else:
                    break
            else:
                raise AssertionError(f"the chat did not end after {rest!r}")
        os.close(self.file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


@pytest.fixture
def terminal(main):
    opened = []

    def open_terminal(*options, model=main, **env):
        chat = Terminal(model, main.parent / "draft", "--max-new-tokens", TOKENS, *EXACT, *options, **env)
        opened.append(chat)
        chat.see("/help lists the commands.")
        chat.see("> ")
        return chat

    yield open_terminal
    for chat in opened:
        with contextlib.suppress(OSError, ChildProcessError):
            os.kill(chat.pid, 9)
            os.waitpid(chat.pid, 0)


@needs_terminal
def test_accepted_draft_tokens_are_green(terminal, answers):
    texts, coloured = answers
    chat = terminal("-k", 5, NO_COLOR=None)
    chat.type(QUESTIONS[0] + "\n")
    chat.see(QUESTIONS[0] + "\r\n")
    assert chat.see("\r\n(new tokens").replace("\r\n", "\n") == coloured
    assert GREEN in coloured
    chat.see("> ")
    chat.type("/colour off\n/reset\n" + QUESTIONS[0] + "\n")
    chat.see("colour off")
    chat.see("cleared")
    chat.see(QUESTIONS[0] + "\r\n")
    assert chat.see("\r\n(new tokens").replace("\r\n", "\n") == texts[0]
    chat.see("> ")
    chat.type("\x04")  # Ctrl-D
    status, rest = chat.leave()
    assert (status, "Traceback" in rest) == (0, False)


@needs_terminal
def test_accepted_sampled_draft_tokens_are_green(terminal, engine):
    result = engine.generate([{"role": "user", "content": QUESTIONS[0]}], sampled_config(1.5), seed=3)
    assert any(result.from_draft)
    coloured = ""
    for token, from_draft in zip(result.tokens, result.from_draft, strict=True):
        piece = engine.tokenizer.decode([token])
        coloured += f"{GREEN}{piece}{PLAIN}" if piece and from_draft else piece
    chat = terminal("-k", 3, "--temperature", 1.5, "--seed", 3, NO_COLOR=None)
    chat.type(QUESTIONS[0] + "\n")
    chat.see(QUESTIONS[0] + "\r\n")
    assert chat.see("\r\n(new tokens").replace("\r\n", "\n") == coloured
    chat.see("> ")
    chat.type("/quit\n")
    assert chat.leave()[0] == 0


@needs_terminal
def test_no_color_disables_colours(terminal, answers):
    chat = terminal(NO_COLOR="1")
    chat.type(QUESTIONS[0] + "\n")
    chat.see(QUESTIONS[0] + "\r\n")
    assert chat.see("\r\n(new tokens").replace("\r\n", "\n") == answers[0][0]
    chat.see("> ")
    chat.type("/quit\n")
    assert chat.leave()[0] == 0


@needs_terminal
def test_lines_can_be_edited_and_recalled(terminal):
    chat = terminal()
    chat.type("/k 44\x7f\n")  # backspace
    chat.see("K = 4: always 4 draft tokens")
    chat.see("> ")
    chat.type("/tokens 7\n")
    chat.see("at most 7 tokens")
    chat.see("> ")
    chat.type("\x10\x10\n")  # Ctrl-P, the key of history, twice
    chat.see("K = 4: always 4 draft tokens")
    chat.see("> ")
    chat.type("/quit\n")
    assert chat.leave()[0] == 0


@needs_terminal
def test_ctrl_c_stops_the_answer_and_at_the_prompt_the_chat(terminal, main, tmp_path):
    endless = tmp_path / "endless"
    shutil.copytree(main, endless)
    (endless / "generation_config.json").write_text('{"eos_token_id": 4095}', encoding="utf-8")
    chat = terminal("--max-new-tokens", 1900, "-k", 3, model=endless)
    chat.type(QUESTIONS[0] + "\n")
    chat.see(QUESTIONS[0] + "\r\n")
    chat.see(PLAIN)  # the answer streams
    chat.type("\x03")
    chat.see("(stopped)")
    chat.see("> ")
    chat.type("/tokens 3\n")
    chat.see("at most 3 tokens")
    chat.see("> ")
    chat.type(QUESTIONS[1] + "\n")
    chat.see("(new tokens 3,")  # a stopped answer does not stop the next one
    chat.see("> ")
    chat.type("\x03")
    status, rest = chat.leave(again="\x03")  # readline shows its prompt a moment before it listens
    assert (status, "Traceback" in rest) == (130, False)
