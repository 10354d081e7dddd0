"""Log-probabilities are those of the main model alone, and a logit bias is part of the distribution, in both decoders,
with any draft. Tiny models in exact arithmetic; the same checks find planted bugs."""

import dataclasses

import numpy as np
import pytest
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import SuffixProposer
from speculative.models import cached_model, eagle3_head
from speculative.models.batch_model import BatchModel
from speculative.models.eagle3_batch import BatchHead
from speculative.models.spec import ModelSpec
from speculative.sampling.distribution import Distribution, InvalidLogits
from speculative.sampling.logprobs import token_logprobs
from speculative.sampling.lossless_check import compare, exact_joint, main_alone
from speculative.sampling.params import SamplingParams
from speculative.sequence import sequence
from speculative.sequence.output import OutputProcessor
from tests.support.letters import shared_letters
from tests.support.steps import finish
from tests.support.tiny_eagle3 import fitted, save_head, tiny_head
from tests.support.tiny_llama import VOCABULARY, save_tiny_llama, tiny_llama

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
PROMPT = np.array([1, 5, 2, 6, 3, 0])
SOURCES = ("none", "good", "lookup", "eagle3", "other tokenizer")
FALSE_ALARM = 2e-8
ROOM = 640


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    head = fitted(dataclasses.replace(tiny_head(seed=5), layers=[0, 0, 0]), tiny_llama(seed=1))
    return {
        "main": save_tiny_llama(folder / "main", seed=1),
        "good": save_tiny_llama(folder / "good", seed=1, noise=0.2),
        "other tokenizer": save_tiny_llama(folder / "other", seed=2),
        "eagle3": save_head(folder / "eagle3", head),
    }


@pytest.fixture(scope="module")
def load(folders):
    """A function that loads a model, or the main model with its EAGLE-3 head."""

    def load(name):
        if name == "eagle3":
            specs = (ModelSpec(folders[one], "CPU", EXACT) for one in ("main", "eagle3"))
            return eagle3_head.load(*specs, capacity=ROOM, head_capacity=ROOM)
        return cached_model.load(ModelSpec(folders[name], "CPU", EXACT), capacity=ROOM)

    return load


@pytest.fixture(scope="module")
def main(load):
    return load("main")


def one_at_a_time(load, source):
    main, draft = (load("main"), None) if source != "eagle3" else load("eagle3")
    if source == "lookup":
        draft = SuffixProposer(VOCABULARY)
    elif source == "other tokenizer":
        draft = DraftModelProposer(load(source), VOCABULARY, Retokenizer(shared_letters()))
    elif source != "none":
        draft = DraftModelProposer(draft or load(source), VOCABULARY)
    return Decoder(main, draft, FixedDraftLength(3))


def batched(load, source):
    main, draft = (load("main"), None) if source != "eagle3" else load("eagle3")
    main = BatchModel(main, 256)
    if source == "eagle3":
        draft = BatchHead(draft, main, 256)
    elif source in ("good", "other tokenizer"):
        draft = BatchModel(load(source), 256)
    costs = (LatencyCurve({1: 1.0, 64: 1.5}), LatencyCurve({1: 0.1}), LatencyCurve({1: 0.1}))
    shared = shared_letters() if source == "other tokenizer" else None
    suffix = SuffixProposer(VOCABULARY) if source == "lookup" else None
    return BatchDecoder(main, draft, BatchDraftLength(*costs), shared=shared, suffix=suffix)


def generated(decoder, prompts, config, **options):
    """The results of `prompts`, with the seeds 0, 1, ..."""
    if isinstance(decoder, Decoder):
        return [decoder.generate(prompt, config, seed=i, **options) for i, prompt in enumerate(prompts)]
    requests = [decoder.add_request(prompt, config, i, **options) for i, prompt in enumerate(prompts)]
    finish(decoder)
    return [request.result for request in requests]


def config_of(tokens, **options):
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, ignore_eos=True, num_assistant_tokens=3, **options)
    config.logprobs = 3
    return config


def difference(main, prompt, result):
    """The largest difference to the log-softmax of the main model's logits on the same tokens, or of a rank."""
    tokens = np.concatenate([prompt, result.tokens]).astype(np.int64)
    main.reset()
    logits = main.logits(tokens, last=len(tokens)).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = [*result.prompt_logprobs, *result.logprobs]
    begin = len(tokens) - len(found)
    worst = 0.0
    for row, token, one in zip(exact[begin - 1 :], tokens[begin:], found, strict=False):
        worst = max(worst, abs(one.rank - 1 - np.count_nonzero(row > row[token])))
        expected = [row[token], *np.sort(row)[::-1][: len(one.top_ids)], *row[one.top_ids]]
        worst = max(worst, np.abs(np.array(expected) - [one.logprob, *one.top_logprobs, *one.top_logprobs]).max())
    return worst


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_logprobs_equal_those_of_main_model_alone(kind, source, load, main):
    """Before temperature, penalties and bias; also of accepted draft tokens."""
    config = config_of(40, temperature=1.5, repetition_penalty=1.2, top_k=5)
    prompts = [PROMPT, PROMPT[::-1].copy(), PROMPT[:3]]
    results = generated(kind(load, source), prompts, config, logit_bias={3: 2.0})
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.logprobs) == len(result.tokens) == 40 and not result.prompt_logprobs
        assert difference(main, prompt, result) < 1e-4
    assert source == "none" or sum(sum(result.from_draft) for result in results) > 5


def test_logprobs_of_the_token_after_a_leaf_are_those_of_main_model_alone(load, main):
    """Its logits are those of the leaf, behind those of the draft tokens."""
    config = config_of(40)
    config.num_assistant_tokens, config.tree_depth = 8, 2
    decoder = one_at_a_time(load, "good")
    assert any(step.ends_in_leaf for step in decoder.stream(PROMPT, config, seed=0))
    (result,) = generated(decoder, [PROMPT], config)
    assert len(result.logprobs) == 40 and difference(main, PROMPT, result) < 1e-4


@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_logprobs_shifted_after_a_rejection_are_detected(kind, load, main, monkeypatch):
    verify = sequence.Sequence.verify

    def wrong(self, logits):
        step = verify(self, logits)
        if step.accepted < step.proposed:
            i, token = step.accepted, step.tokens[step.accepted]
            logprobs = [*step.logprobs[:i], token_logprobs(logits[i + 1], token, self.params.logprobs)]
            step = step._replace(logprobs=logprobs)
        return step

    monkeypatch.setattr(sequence.Sequence, "verify", wrong)
    (result,) = generated(kind(load, "good"), [PROMPT], config_of(40))
    assert difference(main, PROMPT, result) > 0.01


@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_logprobs_are_not_computed_unless_requested(kind, load, monkeypatch):
    monkeypatch.setattr(sequence, "token_logprobs", None)
    config = config_of(10)
    config.logprobs = 0
    (result,) = generated(kind(load, "good"), [PROMPT], config)
    assert len(result.tokens) == 10 and not result.logprobs and not result.prompt_logprobs


@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_prompt_logprobs_are_computed_in_chunks(kind, load, main):
    """Even if the prompt is cached. Logits of at most 64 tokens are kept at a time."""
    prompt = np.random.default_rng(0).integers(0, 8, 150)
    decoder = kind(load, "good")
    generated(decoder, [prompt], config_of(3))
    rows, backend = [], decoder.main.backend if kind is one_at_a_time else decoder.main._backend
    name = "run" if kind is one_at_a_time else "run_together"
    run = getattr(backend, name)

    def counted(*arguments, **options):
        found = run(*arguments, **options)
        rows.append(len(found))
        return found

    setattr(backend, name, counted)
    results = generated(decoder, [prompt, prompt], config_of(3), prompt_logprobs=2)
    for result in results:
        assert len(result.prompt_logprobs) == 149 and len(result.logprobs) == 3
        assert difference(main, prompt, result) < 1e-4
        assert {len(one.top_ids) for one in result.prompt_logprobs} == {2}
    assert max(rows) == (64 if kind is one_at_a_time else 128)
    (again,) = generated(decoder, [prompt], config_of(3))
    assert again.tokens == results[0].tokens


def test_tokens_after_a_stop_string_have_no_logprobs():
    params = SamplingParams.resolve(GenerationConfig(max_new_tokens=50, stop_strings={"d"}))
    output = OutputProcessor(params, lambda ids: "".join("abcdefgh"[i] for i in ids))
    row = np.arange(8, dtype=np.float32)
    for tokens in ([0, 1], [2, 3, 4, 5]):
        output.add_step(sequence.Step(tokens, 0, 0, logprobs=[token_logprobs(row, token, 1) for token in tokens]))
    assert output.result.tokens == [0, 1, 2, 3] and [one.rank for one in output.result.logprobs] == [8, 7, 6, 5]


def test_logits_without_a_maximum_have_no_logprobs():
    for bad in (np.nan, np.inf):
        with pytest.raises(InvalidLogits, match="no token has a log-probability"):
            token_logprobs(np.array([0, bad, 1], np.float32), 0, 1)
    one = token_logprobs(np.array([0, -np.inf], np.float32), 1, 5)
    assert one.logprob == -np.inf and one.rank == 2 and one.top_ids.tolist() == [0, 1]


def test_equal_logits_are_in_the_order_of_token_ids():
    logits = np.tile(np.array([2, 1], np.float32), 50)
    order = [*range(0, 100, 2), *range(1, 100, 2)]
    for top in (60, 100):
        assert token_logprobs(logits, 0, top).top_ids.tolist() == order[:top]


# ---- logit bias -----------------------------------------------------------------------------------------------------


def p_value(decoder, main, options, draws=400):
    """Compare the first three tokens of texts with their exact joint distribution."""
    config = GenerationConfig(do_sample=True, max_new_tokens=7, ignore_eos=True, num_assistant_tokens=3, **options)
    bias = {2: 1.5, 5: -2.0, 6: 0.7}
    params = SamplingParams.resolve(config, logit_bias=bias)
    main.reset()
    cells = exact_joint(main_alone(main, PROMPT, params), 3)
    drawn = []
    while len(drawn) < draws:
        if isinstance(decoder, Decoder):
            drawn.append([token for step in decoder.stream(PROMPT, config, None, bias) for token in step.tokens][:3])
            continue
        requests = [decoder.add_request(PROMPT, config, logit_bias=bias) for _ in range(20)]
        for i, request in enumerate(requests):
            request.sequence.random = np.random.default_rng(len(drawn) + i)
        finish(decoder)
        drawn += [request.result.tokens[:3] for request in requests]
    return compare(drawn, cells).p_value


@pytest.mark.parametrize("source", SOURCES[1:])
@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_samples_with_a_bias_have_the_exact_joint_distribution(kind, source, load, main):
    decoder = kind(load, source)
    if kind is one_at_a_time:
        decoder.reset(seed=1)
    assert p_value(decoder, main, {"frequency_penalty": 0.3} if source == "good" else {}) > FALSE_ALARM


def test_samples_show_a_bias_missing_in_draft_probabilities(load, main, monkeypatch):
    propose = DraftModelProposer.propose
    plain = Distribution(SamplingParams.resolve(GenerationConfig(do_sample=True, max_new_tokens=7)))

    def wrong(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        logits = self.model.logits(tokens)[0]
        return proposal._replace(q=plain(logits, tokens[:6], tokens[6:]))

    monkeypatch.setattr(DraftModelProposer, "propose", wrong)
    decoder = one_at_a_time(load, "good")
    decoder.reset(seed=1)
    assert p_value(decoder, main, {}, draws=1500) < FALSE_ALARM


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [one_at_a_time, batched])
def test_bias_of_100_forces_and_minus_100_bans_a_token(kind, source, sampled, load):
    decoder, config = kind(load, source), config_of(20)
    config.do_sample = sampled
    forced, banned = (
        generated(decoder, [PROMPT], config, logit_bias=bias)[0] for bias in ({4: 100}, {4: -100, 1: -100})
    )
    assert forced.tokens == [4] * 20 and not {4, 1} & set(banned.tokens)


def test_bias_of_unknown_token_is_rejected(load):
    for kind in (one_at_a_time, batched):
        with pytest.raises(ValueError, match=r"^logit_bias has token 8, but the model's token ids are 0 to 7$"):
            generated(kind(load, "none"), [PROMPT], config_of(3), logit_bias={0: 1, 8: 1})
