"""Online training: the main model in torch reads and writes as its IR does, and the command makes a head with it."""

import json
import shutil

import numpy as np
import openvino_genai
import pytest
from openvino_genai import GenerationConfig

from convert import make_draft
from speculative import ModelSpec, decoder
from speculative.convert.draft_training import beginnings
from speculative.convert.draft_training.clock import Clock
from speculative.convert.draft_training.eagle3 import Eagle3
from speculative.convert.draft_training.main_model import MainModel
from speculative.convert.draft_training.texts import Text, TextFile
from speculative.convert.errors import ConvertError
from tests.support.later import Later, torch
from tests.support.tiny_main import save_tiny_main

device_writer, online, slots, torch_main = (
    Later(f"speculative.convert.draft_training.{name}") for name in ("device_writer", "online", "slots", "torch_main")
)
TRAINING = "speculative.convert.draft_training.training"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
SHORT = ["--minutes", "0.1", "--tokens", "4000", "--length", "64", "--draft-vocabulary", "320", "--threads", "1"]
LENGTH = 40


def run(*arguments):
    return make_draft.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    return save_tiny_main(tmp_path_factory.mktemp("online") / "main")


@pytest.fixture(scope="module")
def kind(main):
    return Eagle3(MainModel(ModelSpec(main, "CPU", EXACT)))


@pytest.fixture(scope="module")
def in_torch(kind):
    return torch_main.TorchMain(kind.main, kind.layers, "cpu")


def template(stop=(), turn_stop=None, after_turn=(5, 6), after_answer=(7, 8, 9), longest_turn=10):
    turn_stop = stop if turn_stop is None else turn_stop
    return slots.Template([*stop], [*turn_stop], [*after_turn], [*after_answer], longest_turn)


def complete(texts, count, begin):
    """The first `count` texts that are complete."""
    found = []
    while len(found) < count:
        found += texts.run(begin)
    return found


# --- the main model in torch ---


def test_torch_main_reads_what_the_ir_computes(kind, in_torch):
    texts = [np.arange(3, 33), np.arange(40, 380, 17)]
    tokens, mask = np.zeros((2, 30), np.int64), np.zeros((2, 30), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, 4 : len(text)] = True
    states, ids, probabilities = in_torch.read(torch.from_numpy(tokens), torch.from_numpy(mask), 8)
    reader = kind.reader(8)
    for row, text in enumerate(texts):
        expected, n = reader.read(text), len(text)
        error = np.linalg.norm(states[row, :n].numpy() - expected.states) / np.linalg.norm(expected.states)
        assert error < 2e-3, error  # those of the IR are rounded to float16
        assert (ids[row, 4:n, 0].numpy() == expected.ids[4:, 0]).all()
        assert np.allclose(probabilities[row, 4:n], np.exp(expected.log_probabilities[4:].astype(float)), atol=2e-3)
        assert not probabilities[row, :4].any()


def test_positions_are_exact_in_bfloat16(kind, in_torch, monkeypatch):
    """As on a GPU. Frequencies of 8 bits would turn the queries of late positions by another angle."""
    monkeypatch.setattr("speculative.convert.draft_training.torch_main._dtype", lambda _: torch.bfloat16)
    rounded = torch_main.TorchMain(kind.main, kind.layers, "cpu")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 380, (1, 128)))
    late = torch.arange(128)[None] >= 100
    (found, *_), (expected, *_) = (main.read(tokens, late, 8) for main in (rounded, in_torch))
    difference = (found.float() - expected)[late].norm() / expected[late].norm()
    assert difference < 0.02, difference


def test_slots_write_the_greedy_texts_of_the_main_model(main, in_torch):
    """More texts than slots: a slot's later texts do not see its earlier ones."""
    prompts = [[3 + i, *range(20, 21 + i)] for i in range(8)]
    waiting = [slots.Start(prompt, False, 0, 0.0, index) for index, prompt in enumerate(prompts)]
    texts = slots.Slots(in_torch, 3, LENGTH, template())
    alone = decoder.load(ModelSpec(main, "CPU", EXACT))
    found = {
        text.start.prompt: text
        for text in complete(
            texts, len(prompts), lambda: waiting.pop(0) if waiting else slots.Start([3], False, 0, 0.0)
        )
    }
    for index, prompt in enumerate(prompts):
        text = found[index]
        assert text.answer == len(prompt) and text.tokens[: text.answer].tolist() == prompt
        config = GenerationConfig(max_new_tokens=LENGTH - len(prompt), ignore_eos=True)
        assert text.tokens[text.answer :].tolist() == alone.generate(prompt, config).tokens


def test_slots_draw_from_the_distribution_of_the_main_model(in_torch):
    """The first token of 4,000 answers at temperature 1, without their others."""
    torch.manual_seed(0)
    prompt, draws = [3, 50], 4000
    texts = complete(slots.Slots(in_torch, draws, 3, template()), draws, lambda: slots.Start(prompt, False, 0, 1.0))
    counts = np.bincount([text.tokens[2] for text in texts[:draws]], minlength=in_torch.vocabulary)
    tokens = torch.tensor([prompt])
    _, ids, probabilities = in_torch.read(tokens, torch.ones(1, 2, dtype=torch.bool), in_torch.vocabulary)
    expected = np.zeros(in_torch.vocabulary)
    expected[ids[0, -1].numpy()] = probabilities[0, -1].numpy()
    distance = np.abs(counts / draws - expected).sum() / 2
    noise = np.sqrt(expected * (1 - expected) / draws).sum() / 2  # of exact draws: about 0.8 of this
    assert distance < 1.3 * noise, (distance, noise)


@pytest.mark.parametrize("turns", [0, 1])
def test_slots_write_user_turns_and_answers(in_torch, turns):
    """Every token stops, so that each part ends at once; the first token of a turn may not."""
    stop = [token for token in range(in_torch.vocabulary) if token % 3 == 0]
    texts = slots.Slots(in_torch, 16, LENGTH, template(stop))
    after_turn, after_answer = [5, 6], [7, 8, 9]
    seen = 0
    for text in complete(texts, 40, lambda: slots.Start([4, 10], True, turns, 1.0)):
        tokens = text.tokens.tolist()
        assert tokens[:2] == [4, 10] and tokens[text.answer - 2 : text.answer] == after_turn
        turn = tokens[2 : text.answer - 2]
        assert 1 <= len(turn) <= 9 and not {*turn} & {*stop}
        first_answer = tokens[text.answer :]
        if turns and len(tokens) < LENGTH:
            at = next(i for i in range(len(first_answer)) if first_answer[i : i + 3] == after_answer)
            assert not {*first_answer[:at]} & {*stop}
            seen += 1
        elif len(tokens) < LENGTH:
            assert first_answer[-1] in stop and not {*first_answer[:-1]} & {*stop}
            seen += 1
    assert seen > 10


def test_tokens_that_end_user_turns_do_not_end_answers(in_torch):
    """Such as a newline, with which the text after a user turn begins in some chat templates."""
    turn_stop = [token for token in range(in_torch.vocabulary) if token % 3 == 0]
    texts = slots.Slots(in_torch, 16, LENGTH, template((), turn_stop))
    found = complete(texts, 20, lambda: slots.Start([4, 10], True, 1, 1.0))
    assert all(len(text.tokens) == LENGTH for text in found)
    assert any({*text.tokens[text.answer :].tolist()} & {*turn_stop} for text in found)
    assert not any({*text.tokens[2 : text.answer - 2].tolist()} & {*turn_stop} for text in found)


# --- texts and batches ---


@pytest.fixture
def prompts():
    return [beginnings.Prompt(f"open the file {i}, read its lines and write them", f"kind {i % 2}") for i in range(12)]


def test_texts_answer_given_prompts_and_beginnings_of_them(in_torch, prompts, tmp_path):
    """With a chat template whose parts are tokens of their own, as those of real models."""
    turn = "{% for message in messages %}{{ 'def\n' + message['content'] + '\n' }}{% endfor %}{{ 'return\n' }}"
    main = save_tiny_main(tmp_path / "main", chat_template=turn)
    file = TextFile(tmp_path / "texts.jsonl")
    writer = device_writer.DeviceWriter(ModelSpec(main, "CPU", {}), in_torch, 96, prompts, file)
    unfinished: list[int] = []
    writer.write(lambda: 1.0, 12_000, unfinished.append)
    assert 96 < max(unfinished) <= 96 * device_writer.CPU_SLOTS
    tokenizer = openvino_genai.Tokenizer(str(main))
    given = {f"def\n{prompt.text}\nreturn\n" for prompt in prompts}
    decoded = [(tokenizer.decode(text.prompt), text) for text in file.texts]
    as_given = [text for prompt, text in decoded if prompt in given]
    assert {text.category for text in as_given} == {"kind 0", "kind 1"} and 0.1 < len(as_given) / len(decoded) < 0.9
    held_out = {tuple(text.prompt) for text in file.held_out}
    assert 2 <= len(held_out) <= 4 and all(text.category for text in file.held_out)
    assert not held_out & {tuple(text.prompt) for text in file.training}
    continued = [prompt for prompt, _ in decoded if prompt.startswith("def\nopen the") and prompt not in given]
    assert len({*continued}) > 3
    assert max(len(text.tokens) for text in file.texts) <= 96


def test_held_out_prompt_that_the_model_writes_is_not_trained_on(in_torch, prompts, tmp_path):
    file = TextFile(tmp_path / "texts.jsonl")
    main = ModelSpec(save_tiny_main(tmp_path / "main", chat_template=None), "CPU", {})
    writer = device_writer.DeviceWriter(main, in_torch, 96, prompts, file)
    for index in range(len(prompts)):
        prompt = writer._prompts[index][0]
        tokens = np.array([*writer._opening.lead, *prompt, *range(20)])
        writer._keep(slots.Written(tokens, len(tokens) - 20, slots.Start([], True, 0, 1.0)))
    assert {tuple(text.prompt) for text in file.held_out} == {
        tuple(writer._prompts[index][0]) for index in writer._held_out
    }
    assert len(file.training) == len(prompts) - len(writer._held_out) and file.held_out[0].category


def test_texts_continue_first_words_without_a_chat_template(in_torch, prompts, tmp_path):
    """The token before the model's own texts is none of the prompts'."""
    main = save_tiny_main(tmp_path / "main", chat_template=None)
    tokenizer = openvino_genai.Tokenizer(str(main))
    file = TextFile(tmp_path / "texts.jsonl")
    writer = device_writer.DeviceWriter(ModelSpec(main, "CPU", {}), in_torch, 96, prompts, file)
    assert tokenizer.encode(prompts[0].text).input_ids.data[0].tolist()[:1] != writer._opening.prefix
    writer.write(lambda: 1.0, 6_000, lambda tokens: None)
    given = {prompt.text for prompt in prompts}
    written = {tokenizer.decode(text.prompt) for text in file.texts}
    assert sum(prompt.startswith("open the") and prompt not in given for prompt in written) > 3


def test_chat_template_longer_than_a_text_is_an_error(main, in_torch, tmp_path):
    file = TextFile(tmp_path / "texts.jsonl")
    with pytest.raises(
        ConvertError, match=r"the chat template of .* takes \d+ tokens; give a --length well above that"
    ):
        device_writer.DeviceWriter(ModelSpec(main, "CPU", {}), in_torch, 9, [], file)


def test_online_batch_trains_on_answers_alone(kind, in_torch, tmp_path):
    arguments = (tmp_path / "training.pt", kind.main.shape, kind.states, kind.main.embeddings(), "cpu")
    beginning = Later("speculative.convert.draft_training.head").Beginning(np.arange(320), {})
    training = online.OnlineHeadTraining(in_torch, *arguments, lambda: beginning)
    tokens = np.arange(10, 30)
    batch = training._batch([(tokens, 6), (tokens[:9], 4)])
    assert batch.mask[0].nonzero()[:, 0].tolist() == [*range(5, 19)]  # where token 6, ..., 19 comes next
    assert batch.mask[1].nonzero()[:, 0].tolist() == [*range(3, 8)]
    assert batch.probabilities[batch.mask].sum(-1).min() > 0.5 and not batch.probabilities[~batch.mask].any()


# --- the command ---


@pytest.fixture(scope="module")
def made(main, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "draft"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BATCH": 256, "MIN_STEPS": 500}.items():
            patch.setattr(f"{TRAINING}.{name}", value)
        patch.setattr(Clock, "verdict_seconds", 1.0)
        assert run(main, out, *SHORT, "--online") == 0
    return out


def test_online_training_makes_a_head(made, main, capsys):
    record = json.loads((made / "draft.json").read_text())
    assert record["training"]["held_out_agreement"][0] > 0.2 and len(record["training"]["held_out_agreement"]) == 4
    assert record["data"]["tokens"] > 1000 and record["verdict"]["greedy"]["acceptance_by_position"][0] > 0.02
    texts = [Text(*json.loads(line)) for line in (made / "work/texts.jsonl").read_text().splitlines()]
    trained_on = [text for text in texts if not text.held_out]
    assert record["data"]["texts"] == len(trained_on)
    assert record["data"]["tokens"] == sum(len(text.tokens) for text in trained_on)
    assert not (made / "work/states/lengths").stat().st_size
    assert run(main, made, *SHORT, "--online") == 0
    assert "is complete" in capsys.readouterr().out


def test_other_kind_of_training_in_the_same_folder_is_an_error(made, main, capsys):
    assert run(main, made, *SHORT) == 2
    assert "was begun with another --online" in capsys.readouterr().err


def test_full_device_memory_is_reported(main, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")

    monkeypatch.setattr("speculative.convert.draft_training.device_writer.Slots", full)
    assert run(main, tmp_path / "out", *SHORT, "--online") == 1
    expected = (
        "error: the memory of --device is too small; free some, or give a smaller --length or --draft-vocabulary\n"
    )
    assert capsys.readouterr().err.endswith(expected)


def test_online_is_for_heads_and_llamas(main, kind, tmp_path, capsys, monkeypatch):
    assert run(main, tmp_path / "out", *SHORT[:6], "--online", "--kind", "pruned") == 2
    assert "--online is for --kind eagle3, not pruned" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(main, other)
    config = json.loads((main / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))  # not what the graph computes
    expected = r"--online is for main models of the Llama, .* of which .* is none \(it computes other layer 0\); leave"
    with pytest.raises(ConvertError, match=expected):
        Eagle3(MainModel(ModelSpec(other, "CPU", EXACT))).put_main_on("cpu")
