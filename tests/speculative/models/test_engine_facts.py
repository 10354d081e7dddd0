"""Facts about OpenVINO GenAI 2026.4.1 that the samples rely on. A failure here means that GenAI has changed.

Everything runs on the embedded draft, with a noisy copy of it as its draft, in execution mode ACCURACY: f32 inference,
f32 KV cache, no quantized activations. INFERENCE_PRECISION_HINT=f32 leaves the cache in u8 and the activations in int8
groups, where passes over one token and over K + 1 tokens still resolve near-ties differently.
"""

import shutil
from collections import Counter

import openvino_genai
import pytest

from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
NPU_ON_CPU = {"NPUW_DEVICES": "CPU", **EXACT}  # runs the NPU's code path on a plain CPU
PROMPTS = ["def read_file(path):", "import os\n\n\nclass Walker:\n", "hello there"]


def load(main=DRAFT, draft=None, device="CPU", draft_device="CPU", **properties):
    """Return a pipeline in exact arithmetic, with NPUs emulated on the CPU."""
    if draft:
        own = NPU_ON_CPU if draft_device == "NPU" else EXACT
        properties["draft_model"] = openvino_genai.draft_model(draft, draft_device, **own)
    return openvino_genai.LLMPipeline(main, device, **(NPU_ON_CPU if device == "NPU" else EXACT), **properties)


@pytest.fixture(scope="module")
def alone():
    return load()


@pytest.fixture(scope="module")
def noisy_draft(tmp_path_factory):
    return save_noisy_draft(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def pair(noisy_draft):
    return load(draft=noisy_draft)


class Tokens(openvino_genai.StreamerBase):
    """Collects the tokens of each forward pass of the main model."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def write(self, tokens):
        self.steps.append(list(tokens) if isinstance(tokens, list) else [tokens])
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


def generate(pipe, prompt=PROMPTS[0], **config):
    """Return (tokens, new tokens of each forward pass of the main model, the engine's result)."""
    streamer = Tokens()
    result = pipe.generate([prompt], openvino_genai.GenerationConfig(**config), streamer)
    return [token for step in streamer.steps for token in step], [len(step) for step in streamer.steps], result


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_with_a_draft_equal_those_without(alone, pair, prompt):
    expected, _, _ = generate(alone, prompt, max_new_tokens=60, ignore_eos=True)
    for k in (1, 2, 4, 8):
        assert generate(pair, prompt, max_new_tokens=60, ignore_eos=True, num_assistant_tokens=k)[0] == expected


def test_greedy_equality_holds_for_long_outputs(alone, pair):
    expected, _, _ = generate(alone, max_new_tokens=300, ignore_eos=True)
    assert len(expected) == 300
    assert generate(pair, max_new_tokens=300, ignore_eos=True, num_assistant_tokens=4)[0] == expected


def test_prompt_lookup_gives_greedy_tokens_and_no_extended_metrics(alone):
    lookup = load(prompt_lookup=True)
    expected, _, _ = generate(alone, max_new_tokens=60, ignore_eos=True)
    tokens, gained, result = generate(
        lookup, max_new_tokens=60, ignore_eos=True, num_assistant_tokens=4, max_ngram_size=3
    )
    assert tokens == expected
    assert len(gained) <= 60
    assert result.extended_perf_metrics is None


def test_str_prompt_returns_str_without_metrics(pair):
    assert type(pair.generate("def f():", max_new_tokens=4)) is str
    assert pair.generate(["def f():"], max_new_tokens=4).perf_metrics.get_num_generated_tokens() == 4


def test_zero_assistant_tokens_means_default_of_five(pair):
    zero = generate(pair, max_new_tokens=40, ignore_eos=True, num_assistant_tokens=0)[1]
    five = generate(pair, max_new_tokens=40, ignore_eos=True, num_assistant_tokens=5)[1]
    assert zero == five
    assert max(zero) > 1


def test_huge_k_drafts_up_to_the_last_requested_token():
    same = load(draft=DRAFT)
    _, gained, _ = generate(same, max_new_tokens=30, ignore_eos=True, num_assistant_tokens=100_000)
    assert max(gained) > 10


def test_streamer_receives_all_tokens_of_a_pass_at_once(pair):
    _, gained, result = generate(pair, max_new_tokens=40, ignore_eos=True, num_assistant_tokens=4)
    assert max(gained) > 1
    assert gained == list(result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes)


@pytest.mark.parametrize("wanted", [21, 30])  # below the end of the text, where the draft stops drafting
@pytest.mark.parametrize("k", [4, 5])
def test_engine_counts_exclude_the_last_iteration(pair, k, wanted):
    _, gained, result = generate(pair, max_new_tokens=wanted, ignore_eos=True, num_assistant_tokens=k)
    metrics = result.extended_perf_metrics
    assert metrics.get_num_accepted_tokens() == sum(gained[1:-1]) - len(gained[1:-1])
    proposed = [min(k, wanted - sum(gained[:i]) - 1) for i in range(1, len(gained))]
    assert metrics.get_num_draft_tokens() == sum(proposed[:-1])


def test_pair_uses_stop_tokens_but_not_generation_config_of_main_model(alone, pair):
    assert alone.get_generation_config().eos_token_id >= 0
    assert pair.get_generation_config().eos_token_id == -1
    tokens, _, _ = generate(alone, max_new_tokens=20, ignore_eos=True)
    stop = next(token for token in reversed(tokens) if token != tokens[0])
    cut = tokens[: tokens.index(stop) + 1]
    assert generate(pair, max_new_tokens=20, num_assistant_tokens=4, eos_token_id=stop)[0] == cut


def test_confidence_threshold_drafts_one_token_without_logprobs():
    same = load(draft=DRAFT)
    settings = {"max_new_tokens": 30, "ignore_eos": True, "assistant_confidence_threshold": 1e-6}
    assert max(generate(same, **settings)[1]) == 2  # the drafted token and the main model's own
    assert max(generate(same, **settings, logprobs=1)[1]) > 2


def test_fixed_and_dynamic_draft_lengths_exclude_each_other(pair):
    with pytest.raises(RuntimeError, match="assistant"):
        generate(pair, max_new_tokens=4, num_assistant_tokens=3, assistant_confidence_threshold=0.4)


def test_draft_with_other_tokenizer_is_accepted_silently(tmp_path, other_tokenizer):
    stranger = tmp_path / "stranger"
    shutil.copytree(DRAFT, stranger)
    for file in other_tokenizer.iterdir():
        shutil.copy(file, stranger)
    sentence = "Could you please tell me something about OpenVINO.GenAI?"  # the one the engine compares, by length
    ours, theirs = (openvino_genai.Tokenizer(folder) for folder in (MAIN, stranger))
    assert ours.get_vocab() != theirs.get_vocab()
    assert ours.encode(sentence).input_ids.shape == theirs.encode(sentence).input_ids.shape
    assert len(generate(load(draft=stranger), max_new_tokens=8)[0]) == 8


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "draft_device"), [("AUTO:CPU", "HETERO:CPU"), ("HETERO:CPU", "AUTO:CPU")])
def test_virtual_devices_serve_as_main_and_draft_device(alone, noisy_draft, device, draft_device):
    expected, _, _ = generate(alone, max_new_tokens=30, ignore_eos=True)
    pipe = load(draft=noisy_draft, device=device, draft_device=draft_device)
    assert generate(pipe, max_new_tokens=30, ignore_eos=True, num_assistant_tokens=4)[0] == expected


def test_npu_code_path_gives_greedy_tokens(noisy_draft):
    expected, _, _ = generate(load(device="NPU"), max_new_tokens=30, ignore_eos=True)
    pipe = load(draft=noisy_draft, device="NPU")  # whose tokens are rejected, too
    assert generate(pipe, max_new_tokens=30, ignore_eos=True, num_assistant_tokens=4)[0] == expected


@pytest.mark.parametrize(("device", "draft_device"), [("NPU", "NPU"), ("CPU", "NPU"), ("NPU", "CPU")])
def test_npu_code_path_increases_k_and_counts_every_iteration(device, draft_device):
    pipe = load(draft=DRAFT, device=device, draft_device=draft_device)
    _, gained, result = generate(pipe, max_new_tokens=40, ignore_eos=True, num_assistant_tokens=4)
    assert sum(gained) == 40
    assert max(gained) > 5  # K + 1
    assert result.extended_perf_metrics.get_num_accepted_tokens() == sum(gained[1:]) - len(gained[1:])
    with pytest.raises(RuntimeError, match="only greedy"):
        generate(pipe, max_new_tokens=4, do_sample=True)
    # The counts of the main model go on from call to call there.
    again = generate(pipe, max_new_tokens=4, ignore_eos=True)[2].extended_perf_metrics.main_model_metrics
    assert list(again.raw_metrics.m_batch_sizes)[: len(gained)] == gained


def test_npu_code_path_misses_stop_token_inside_a_draft():
    pipe = load(draft=DRAFT, draft_device="NPU")
    settings = {"max_new_tokens": 60, "num_assistant_tokens": 7}
    tokens, gained, _ = generate(pipe, **settings, ignore_eos=True)
    inside = (i for i in range(1, 60) if i + 1 not in {sum(gained[: n + 1]) for n in range(len(gained))})
    first = next(i for i in inside if tokens[i] not in tokens[:i])
    beyond, _, _ = generate(pipe, **settings, eos_token_id=tokens[first])
    assert len(beyond) > first + 1
    assert beyond == tokens[: len(beyond)]


def test_npu_main_model_supports_k_up_to_seven():
    pipe = load(draft=DRAFT, device="NPU")
    assert sum(generate(pipe, max_new_tokens=120, ignore_eos=True, num_assistant_tokens=7)[1]) == 120
    with pytest.raises(RuntimeError, match="NPUW_LLM_MAX_GENERATION_TOKEN_LEN"):
        generate(pipe, max_new_tokens=120, ignore_eos=True, num_assistant_tokens=16)


# ---- sampling: why no sampled request goes through a pipeline with a draft model ------------------------------------


def sampled(pipe, seeds, **config):
    """Return the first two tokens of one request per seed, sampled with top-k 3."""
    settings = {"do_sample": True, "top_k": 3, "temperature": 5.0, "max_new_tokens": 4, "ignore_eos": True, **config}
    return [tuple(generate(pipe, rng_seed=seed, **settings)[0][:2]) for seed in seeds]


def distance(one, other):
    """Return the total variation distance of two samples of the same size."""
    one, other = Counter(one), Counter(other)
    return sum((one - other).values()) / sum(one.values())


def test_split_prompts_with_a_draft_change_greedy_text():
    """docs/upstream.md; so convert/export_model_server.py turns `dynamic_split_fuse` off."""

    def texts(splits, draft=None):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.dynamic_split_fuse, scheduler.max_num_batched_tokens = splits, 32 if splits else 2048
        config = openvino_genai.GenerationConfig(max_new_tokens=32, ignore_eos=True)
        config.num_assistant_tokens = 3 if draft else 0
        prompts = ["def f(x):", "# " + "read the file and return its lines " * 9]
        return load(MAIN, draft, scheduler_config=scheduler).generate(prompts, config).texts

    alone, whole, split = texts(True), texts(False, DRAFT), texts(True, DRAFT)
    assert whole == alone
    assert split[0] == alone[0] and split[1] != alone[1]


def test_sampling_with_draft_is_wrong_and_with_prompt_lookup_right():
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # with it, such requests also crash now and then
    alone = load(scheduler_config=scheduler)
    target, again = sampled(alone, range(80)), sampled(alone, range(80, 160))
    with_draft = sampled(load(draft=DRAFT, scheduler_config=scheduler), range(80), num_assistant_tokens=3)
    lookup = load(prompt_lookup=True, scheduler_config=scheduler)
    print("distance", distance(with_draft, target), "noise", distance(again, target))
    assert [first for first, _ in with_draft] == [first for first, _ in target]  # the main model's own
    assert distance(with_draft, target) > distance(again, target) + 0.15
    assert distance(sampled(lookup, range(80), num_assistant_tokens=3, max_ngram_size=2), target) <= 0.1
