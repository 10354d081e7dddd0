"""EAGLE-3 heads: what they draft equals a computation from scratch in numpy, after any sequence of rejections.

Sampling is lossless whatever a head drafts (tests/speculative/sampling/test_lossless_draws.py has one): a wrong hidden
state causes no error and costs acceptance only. So each draft distribution is compared, and planted bugs must show.
"""

import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import openvino
import pytest
from openvino_genai import GenerationConfig

from speculative import batch_decoder, load
from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.modelgen import eagle3_ir, llama_ir
from speculative.models import cached_model, eagle3_graph, eagle3_head
from speculative.models.batch_model import BatchModel
from speculative.models.cached_model import CachedModel
from speculative.models.eagle3_batch import BatchHead
from speculative.models.eagle3_graph import HeadGraph, is_head
from speculative.models.eagle3_head import EagleHead, Entries
from speculative.models.spec import ModelSpec
from tests.support import tiny_eagle3
from tests.support.tiny_eagle3 import EXACT, KNOWN, TAPS, HiddenStates, fitted, save_head, tiny_head
from tests.support.tiny_llama import HIDDEN, VOCABULARY, save_tiny_llama, tiny_llama

LAYERS = 4
MAIN = tiny_llama(seed=1, layers=LAYERS)
PROMPT = np.array([1, 5, 2, 6, 3, 0])
CLOSE = 1e-3  # total variation that rounding may cause


@pytest.fixture(scope="module")
def head():
    return fitted(tiny_head(seed=5), MAIN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, head):
    folder = tmp_path_factory.mktemp("tiny_eagle3")
    return save_tiny_llama(folder / "main", seed=1, layers=LAYERS), save_head(folder / "head", head)


def decoder_of(main, draft, k=3, capacity=128, leaves=0):
    specs = ModelSpec(main, "CPU", EXACT), ModelSpec(draft, "CPU", EXACT)
    model, draft_model = eagle3_head.load(*specs, capacity=capacity)
    return Decoder(model, DraftModelProposer(draft_model, model.vocab_size), FixedDraftLength(k, leaves))


class Drafts(NamedTuple):
    largest_error: float  # total variation between a draft distribution and the one recomputed from scratch
    acceptance_rate: float


def compare_drafts(decoder, head, monkeypatch):
    """Decode 40 tokens and compare every draft distribution with one that is computed from scratch."""
    hidden_states, errors, verified = HiddenStates(MAIN, head.layers), [], [len(PROMPT)]
    propose = DraftModelProposer.propose

    def compared(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        drafted = len(tokens) - verified[0]
        states, _ = hidden_states(tokens[: len(tokens) - 1 - drafted])
        expected = transform(tiny_eagle3.logits(head, MAIN, states, tokens).astype(np.float32), tokens)
        errors.append(np.abs(np.asarray(proposal.q) - np.asarray(expected)).sum() / 2)
        return proposal

    monkeypatch.setattr(DraftModelProposer, "propose", compared)
    settings = GenerationConfig(max_new_tokens=40, do_sample=True, ignore_eos=True)
    accepted = proposed = of_leaves = 0
    for step in decoder.stream(PROMPT, settings, seed=3):
        verified[0] += len(step.tokens)
        of_leaves += step.ends_in_leaf
        accepted, proposed = accepted + step.accepted, proposed + step.proposed
    assert bool(of_leaves) == bool(decoder.draft_length.tree)
    return Drafts(max(errors), accepted / proposed)


@pytest.mark.parametrize("k, leaves", [(1, 0), (2, 0), (5, 0), (1, 3), (3, 6)])
def test_draft_distributions_equal_those_computed_from_scratch(folders, head, monkeypatch, k, leaves):
    drafts = compare_drafts(decoder_of(*folders, k=k, leaves=leaves), head, monkeypatch)
    print(drafts)
    assert drafts.largest_error < CLOSE and 0.2 < drafts.acceptance_rate < 0.95


def test_head_catches_up_after_plain_decoding_and_long_prompts(folders, head, monkeypatch):
    """Hidden states of tokens verified without a draft are kept, and long runs are split into chunks."""
    decoder = decoder_of(*folders)
    decoder.draft.model.backend.chunk = decoder.main.backend.chunk = 4
    drafts = iter([0, 0, 3, 0, 0, 0, 0, 2, 5, 1] * 10)

    class Sometimes(FixedDraftLength):
        def update(self, *_):
            self.k = next(drafts)

    decoder.draft_length = Sometimes(2)
    assert compare_drafts(decoder, head, monkeypatch).largest_error < CLOSE


def test_head_supports_edited_and_new_texts(folders):
    """As in chats: a head whose cache holds another text gives the logits of one without a cache."""
    decoder = decoder_of(*folders)
    main, head = decoder.main, decoder.draft.model
    random = np.random.default_rng(0)
    text = random.integers(0, VOCABULARY, 30)
    for i in range(40):
        if i % 5 == 4:  # nothing but the first token changes
            text = np.concatenate([[(text[0] + 1) % VOCABULARY], text[1:]])
        else:
            text = np.concatenate([text[: random.integers(3, len(text))], random.integers(0, VOCABULARY, 12)])[:100]
        drafts = int(random.integers(0, 3))
        main.logits(text[: len(text) - 1 - drafts])
        prefixes = [text[: len(text) - drafts + more] for more in range(drafts + 1)]
        got = [head.logits(prefix).copy() for prefix in prefixes]
        np.testing.assert_allclose(got[-1], head.logits(text), atol=1e-4)  # computed twice
        head.reset()
        np.testing.assert_allclose(got, [head.logits(prefix).copy() for prefix in prefixes], atol=1e-4)


def test_only_missing_entries_are_computed():
    """Entry t, of tokens t and t + 1, is computed again once the main model has verified its first token."""
    entries, tokens, hidden = Entries(16), np.arange(9), np.zeros((1, 4), np.float32)
    assert entries.missing(tokens[:8], 5) == [(0, 5), (5, 6), (6, 7)]
    entries.commit(tokens, 0, 5, hidden, verified=True)
    entries.commit(tokens, 5, 7, hidden, verified=False)
    assert entries.missing(tokens, 8) == [(5, 8)]
    assert entries.missing(np.array([0, 1, 2, 9, 4]), 4) == [(2, 4)]
    assert entries.missing(np.array([9, 9, 2, 3, 4]), 4) == [(0, 4)]


def test_tokens_outside_draft_vocabulary_have_probability_0(folders):
    decoder = decoder_of(*folders)
    decoder.main.logits(PROMPT)
    tokens = np.append(PROMPT, 3)
    text = decoder._sequence(tokens, GenerationConfig(do_sample=True, max_new_tokens=4))
    proposal = decoder.draft.propose(tokens, text.distribution, decoder._random)
    assert np.flatnonzero(np.asarray(proposal.q)).tolist() == KNOWN.tolist()
    others = proposal.alternatives(VOCABULARY)
    assert sorted([proposal.token, *others]) == KNOWN.tolist()
    likely = np.asarray(proposal.q)[others]
    assert (np.diff(likely) <= 0).all() and proposal.confidence() == pytest.approx(proposal.q[proposal.token])
    greedy = decoder._sequence(tokens, GenerationConfig(max_new_tokens=4))
    best = decoder.draft.propose(tokens, greedy.distribution, decoder._random)
    assert best.q[best.token] == 1 and best.confidence() == pytest.approx(proposal.q[best.token])


def test_greedy_text_equals_main_model_alone(folders):
    decoder, alone = decoder_of(*folders, k=4), Decoder(cached_model.load(ModelSpec(folders[0], "CPU", EXACT)))
    config = GenerationConfig(max_new_tokens=100, ignore_eos=True)
    result = decoder.generate(PROMPT, config)
    assert result.tokens == alone.generate(PROMPT, config).tokens
    assert sum(result.accepted) > 10


def test_head_does_not_draft_beyond_its_context(folders):
    decoder = decoder_of(*folders)
    decoder.main.logits(np.zeros(50, np.int64))
    decoder.draft.model.capacity = 50
    assert decoder.draft.propose(np.zeros(50, np.int64), lambda logits, *_: np.full(8, 0.125), decoder._random)
    assert decoder.draft.propose(np.zeros(51, np.int64), lambda logits, *_: np.full(8, 0.125), decoder._random) is None
    with pytest.raises(ValueError, match="its cache fits 50"):
        decoder.draft.model.logits(np.zeros(51, np.int64))


# ---- many requests in one forward pass ------------------------------------------------------------------------------


def compare_batched_drafts(folders, head, monkeypatch, prefix_cache=True):
    """Decode requests that come and go, the later ones with the beginning of the first, and compare as above."""
    main, draft = (ModelSpec(folder, "CPU", EXACT) for folder in folders)
    model, head_model = eagle3_head.load(main, draft, capacity=1024, head_capacity=1024)
    batch = BatchModel(model, 256, prefix_cache)
    costs = LatencyCurve({1: 1.0, 17: 2.0}), LatencyCurve({1: 0.1}), LatencyCurve({1: 0.1})
    decoder = BatchDecoder(batch, BatchHead(head_model, batch, 256), BatchDraftLength(*costs))
    hidden_states, errors = HiddenStates(MAIN, head.layers), []
    propose = DraftModelProposer.propose

    def compared(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        sequence = next(request.sequence for request in decoder._requests if request.draft_slot is self.model)
        states, _ = hidden_states(tokens[: sequence.n - 1])
        expected = transform(tiny_eagle3.logits(head, MAIN, states, tokens).astype(np.float32), tokens)
        errors.append(np.abs(np.asarray(proposal.q) - np.asarray(expected)).sum() / 2)
        return proposal

    monkeypatch.setattr(DraftModelProposer, "propose", compared)
    random = np.random.default_rng(0)
    shared = random.integers(0, VOCABULARY, 70)
    requests = []
    for i in range(5):
        prompt = np.concatenate([shared[: 70 if i < 4 else 3], random.integers(0, VOCABULARY, 5 + 3 * i)])
        k = {"num_assistant_tokens": 1 + i} if i % 2 else {}
        config = GenerationConfig(max_new_tokens=20, do_sample=True, ignore_eos=True, **k)
        requests.append(decoder.add_request(prompt, config, seed=i))
        decoder.step()
        decoder.step()
    while decoder.has_unfinished_requests:
        decoder.step()
    assert not any(request.error for request in requests)
    assert any(request.cached_tokens for request in requests) == prefix_cache
    accepted, proposed = (sum(sum(getattr(r.result, name)) for r in requests) for name in ("accepted", "proposed"))
    return Drafts(max(errors), accepted / proposed)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_batched_requests_draft_as_single_requests(folders, head, monkeypatch, prefix_cache):
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 20)
    drafts = compare_batched_drafts(folders, head, monkeypatch, prefix_cache)
    print(drafts)
    assert drafts.largest_error < CLOSE and 0.2 < drafts.acceptance_rate < 0.95


def test_comparison_detects_hidden_states_of_another_request(folders, head, monkeypatch):
    monkeypatch.setattr(BatchModel, "_entries", lambda self, slot, start, end: np.arange(start, end))
    assert compare_batched_drafts(folders, head, monkeypatch).largest_error > 50 * CLOSE


def test_draft_vocabulary_may_have_any_order(folders, head, tmp_path, monkeypatch):
    other = replace(head, targets=head.targets[[3, 0, 5, 1, 4, 2]])
    those = folders[0], save_head(tmp_path / "head", other)
    with monkeypatch.context() as patch:
        assert compare_drafts(decoder_of(*those), other, patch).largest_error < CLOSE
    assert compare_batched_drafts(those, other, monkeypatch).largest_error < CLOSE


# ---- load -----------------------------------------------------------------------------------------------------------


def test_load_recognises_a_head(folders, tmp_path, monkeypatch):
    main, draft = folders
    assert is_head(draft) and not is_head(main)
    for config, expected in (
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 32000}, True),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, False),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "draft_vocab_size": 32000}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert is_head(tmp_path) == expected
    monkeypatch.setattr("openvino_genai.Tokenizer", lambda folder: None)
    monkeypatch.setattr("speculative.decoder.stop_ids_of", lambda *_: frozenset())
    decoder = load(ModelSpec(main, "CPU", EXACT), draft, capacity=64)
    assert isinstance(decoder.draft.model, EagleHead) and decoder.models == [decoder.main, decoder.draft.model]
    assert decoder.generate(PROMPT, GenerationConfig(max_new_tokens=20, ignore_eos=True), seed=1).tokens


@pytest.mark.parametrize("capacity", [4, 18, 65])
def test_costs_are_measured_in_a_small_capacity(folders, monkeypatch, tmp_path, capacity):
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path))  # with costs from another capacity nothing is measured
    main, draft = (ModelSpec(folder, "CPU", EXACT) for folder in folders)
    monkeypatch.setattr("openvino_genai.Tokenizer", lambda folder: None)
    for module in ("decoder", "batch_decoder"):
        monkeypatch.setattr(f"speculative.{module}.stop_ids_of", lambda *_: frozenset())
    config = GenerationConfig(max_new_tokens=2, ignore_eos=True)
    assert len(load(main, draft, capacity=capacity).generate(PROMPT[:2], config).tokens) == 2
    batch = batch_decoder.load(main, draft, cache_tokens=capacity)
    request = batch.add_request(PROMPT[:2], config)
    while batch.has_unfinished_requests:
        batch.step()
    assert len(request.result.tokens) == 2


def without_taps(model, named="layers."):
    for node in model.get_ordered_ops():
        if named in node.get_friendly_name():
            node.set_friendly_name(f"renamed_{id(node)}")
    return model


@pytest.mark.parametrize(
    "main, layers, message",
    [
        (
            lambda: llama_ir.build(tiny_llama(1, layers=2)),
            TAPS,
            "reads the hidden states of layers 0, 1, 2, but the main",
        ),
        (
            lambda: llama_ir.build(tiny_llama(1, layers=2)),
            [],
            "reads the hidden states of layers 2, 1, -1, but the main",
        ),
        (lambda: llama_ir.build(tiny_llama(1, layers=4)), [0, 1], "'0 1', which must be three layer numbers"),
        (lambda: without_taps(llama_ir.build(tiny_llama(1, layers=4))), TAPS, "layers are not found in its graph"),
    ],
)
def test_main_model_without_required_layers_is_rejected(main, layers, message, head, tmp_path):
    folder = save_head(tmp_path / "head", replace(head, layers=layers))
    with pytest.raises(ValueError, match=message):
        HeadGraph(folder).attach(main())


def test_genai_default_layers_are_used(tmp_path, head):
    folder = save_head(tmp_path / "head", replace(head, layers=[]))
    names = [node.get_friendly_name() for node in HeadGraph(folder)._taps(llama_ir.build(tiny_llama(1, layers=10)))]
    assert names == [f"__module.model.layers.{layer}/aten::add/Add_1" for layer in (2, 5, 7)]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda head: {"targets": np.arange(len(KNOWN))}, "d2t of zeros, for 6 of 8 tokens"),
        (lambda head: {"targets": KNOWN[[0, 1, 1, 2, 3, 4]]}, "not distinct"),
        (lambda head: {"targets": KNOWN - 1}, "negative or"),
        (lambda head: {"targets": KNOWN + 3}, "token ids up to 9, but the main model has 8"),
        (lambda head: {"targets": KNOWN + 2}, "token ids up to 8, but the main model has 8"),
        (lambda head: {"fc": llama_ir.in_int8(np.random.normal(size=(HIDDEN, 90)))}, "size 30 from each layer"),
    ],
    ids=["no d2t", "damaged d2t", "negative d2t", "d2t beyond the vocabulary", "d2t one too far", "hidden size"],
)
def test_mismatched_head_is_rejected(damage, message, head, tmp_path):
    folder = save_head(tmp_path / "head", replace(head, **damage(head)))
    with pytest.raises(ValueError, match=message):
        HeadGraph(folder).attach(llama_ir.build(MAIN))


def test_head_with_embeddings_of_another_size_is_rejected(head, tmp_path):
    random, size = np.random.default_rng(0), 2 * HIDDEN
    embedding = llama_ir.weights(llama_ir.in_int8(random.normal(size=(VOCABULARY, size))), "embed_tokens")
    projections = {name: llama_ir.in_int8(random.normal(size=(HIDDEN, size + HIDDEN))) for name in "qkv"}
    other = replace(head, **projections, input_norm=np.ones(size, np.float32))
    openvino.save_model(eagle3_ir.build(other, embedding.output(0)), tmp_path / "openvino_model.xml")
    with pytest.raises(ValueError, match=f"embeddings of size {size}, but the main model's have size {HIDDEN}"):
        HeadGraph(tmp_path).attach(llama_ir.build(MAIN))


def test_head_may_draft_all_tokens(head, tmp_path):
    """Then its table d2t holds nothing but zeros."""
    lm_head = llama_ir.in_int8(np.random.default_rng(0).normal(size=(VOCABULARY, HIDDEN)))
    every = np.arange(VOCABULARY)
    folder = save_head(tmp_path / "head", replace(head, targets=every, lm_head=lm_head))
    assert HeadGraph(folder).targets.tolist() == every.tolist()


def test_model_that_is_no_head_is_rejected(folders):
    with pytest.raises(ValueError, match="has no table d2t"):
        HeadGraph(folders[0])
    renamed, without_input = HeadGraph(folders[1]), HeadGraph(folders[1])
    without_taps(renamed.model, "midlayer")
    without_input.model.input("hidden_states").set_names({"states"})
    for graph, words in ((renamed, "has no layer of an EAGLE-3 head"), (without_input, "has no input for the main")):
        with pytest.raises(ValueError, match=words):
            graph.attach(llama_ir.build(MAIN))


def test_head_requires_paged_attention(folders):
    main, draft = folders
    with pytest.raises(ValueError, match="need paged attention: run both on a CPU or GPU, not on NPU"):
        load(ModelSpec(main, "NPU"), draft)
    stateful = cached_model.load(ModelSpec(main, "CPU", EXACT), stateful=True, prepare=HeadGraph(draft).attach)
    with pytest.raises(ValueError, match="need paged attention"):
        EagleHead(stateful, stateful, KNOWN)


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def shifted_hidden_states(patch):
    run = CachedModel._run

    def shifted(self, start, tokens, last, *leaves):
        logits = run(self, start, tokens, last, *leaves)
        if self.hidden_states is not None:
            states = self.backend.hidden_states[: len(tokens)]
            self.hidden_states[start : start + len(tokens)] = np.roll(states, 1, axis=0)
        return logits

    patch.setattr(CachedModel, "_run", shifted)


def shifted_d2t(patch):
    read = HeadGraph._read_targets
    patch.setattr(HeadGraph, "_read_targets", lambda self: read(self) + 1)


def stale_hidden_states_after_a_rejection(patch):
    run, computed = CachedModel._run, [0]

    def stale(self, start, tokens, last, *leaves):
        is_stale = self.hidden_states is not None and 10 < start < min(computed[0], self.capacity // 2)
        kept = self.hidden_states[start].copy() if is_stale else None
        logits = run(self, start, tokens, last, *leaves)
        if is_stale:
            self.hidden_states[start] = kept
        computed[0] = max(computed[0], start + len(tokens))
        return logits

    patch.setattr(CachedModel, "_run", stale)


def own_hidden_states_kept_after_acceptance(patch):
    commit = Entries.commit
    patch.setattr(Entries, "commit", lambda self, *arguments, verified: commit(self, *arguments, verified=True))


def hidden_state_of_another_leaf(patch):
    accept = CachedModel.accept_leaf
    patch.setattr(CachedModel, "accept_leaf", lambda self, place, token, leaf: accept(self, place, token, 5 - leaf))


def hidden_state_of_the_rejected_token(patch):
    def wrong(self, place, token, leaf):
        self._tokens[place] = token
        self._length, self._computed = place + 1, place

    patch.setattr(CachedModel, "accept_leaf", wrong)


def wrong_tap(patch):
    taps = HeadGraph._taps

    def later(self, main):
        self.layers = [layer + 1 for layer in self.layers]
        return taps(self, main)

    patch.setattr(HeadGraph, "_taps", later)


def own_embeddings(patch):
    patch.setattr(eagle3_graph, "_share_weights", lambda *_: None)


def main_model_run_not_noticed(patch):
    patch.setattr(EagleHead, "_extend_last_call", lambda self, tokens: self._entries.lack_only_last(tokens))


def tokens_not_shifted(patch):
    run = EagleHead._run
    patch.setattr(EagleHead, "_run", lambda self, tokens, *rest: run(self, np.roll(tokens, 1), *rest))


@pytest.mark.parametrize(
    "bug",
    [
        shifted_hidden_states,
        shifted_d2t,
        stale_hidden_states_after_a_rejection,
        own_hidden_states_kept_after_acceptance,
        hidden_state_of_another_leaf,
        hidden_state_of_the_rejected_token,
        wrong_tap,
        own_embeddings,
        main_model_run_not_noticed,
        tokens_not_shifted,
    ],
)
def test_comparison_detects_planted_bugs(bug, folders, head, monkeypatch):
    bug(monkeypatch)
    drafts = compare_drafts(decoder_of(*folders, leaves=6), head, monkeypatch)
    print(drafts)
    assert drafts.largest_error > 50 * CLOSE
