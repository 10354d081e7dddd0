"""Sampled texts have exactly the main model's distribution: any draft, policy, temperature and filter, on real IRs.

Samples of the first three tokens, for each draft in several settings, are compared with their exact joint distribution,
which is computed from the exported model itself, without this project's cache. The same check finds every bug planted
in the engine. A small error in all cases shows in their sum (Stouffer's sum of the cases' z-values): a temperature of
0.9 instead of 1.0 on later tokens, a total variation of 0.05, is found. With an exact paged cache, the logits after a
text are computed once and kept: texts of three tokens out of eight are few.

    pytest tests/speculative/sampling/test_lossless_draws.py --long

draws 20,000 texts with every draft and every policy; temperatures, filters and caches alternate, and all logits are
computed each time.
"""

import dataclasses
import functools
import itertools

import numpy as np
import openvino as ov
import pytest
from openvino_genai import GenerationConfig

from speculative.decoder import Decoder
from speculative.drafting import combined
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, ConfidenceDraftLength, Costs, FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import SuffixProposer
from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Matrix
from speculative.models import cached_model, eagle3_head
from speculative.models.cached_model import CachedModel
from speculative.models.paged_model import PagedModel
from speculative.models.spec import ModelSpec
from speculative.sampling import rejection_sampling
from speculative.sampling.distribution import Distribution
from speculative.sampling.lossless_check import compare, exact_joint
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import Acceptance, draw, residual
from speculative.sequence import sequence
from speculative.sequence.metrics import per_token_acceptance
from speculative.sequence.sequence import Sequence
from tests.support import pooled_draws
from tests.support.computed_once import ComputedOnce
from tests.support.letters import shared_letters
from tests.support.pooled_draws import distance, pooled, times_found
from tests.support.tiny_eagle3 import fitted, save_head, tiny_head
from tests.support.tiny_llama import VOCABULARY, save_tiny_llama, tiny_llama

DRAWS, DRAWS_LONG = 700, 20_000  # of each case
LENGTH = 3  # tokens compared
PROMPT = np.array([1, 5, 2, 6, 3, 0])
OTHER_PROMPT = np.array([1, 5, 2, 4, 6, 3])  # between draws now and then: another text, the same beginning
WRONG = 6  # the token that the wrong draft is certain of
ONE_LAYER = [0, 0, 0]  # of the main model, which the EAGLE-3 head reads three times
ONE_THREAD = {"INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
EXACT = {**ONE_THREAD, "EXECUTION_MODE_HINT": "ACCURACY"}
CACHES = {
    "paged": EXACT,
    "stateful": EXACT,
    "u8": {**ONE_THREAD, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8"},
    "bf16": {**ONE_THREAD, "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
}
LOOK = 250  # draws with a planted bug between one comparison and the next
FALSE_ALARM = 2e-8  # probability that a correct engine fails one comparison: one full run in a million

DRAFTS = ("same", "good", "useless", "wrong", "lookup")
RULES = ("K=1", "K=2", "K=4", "K=8", "confidence", "adaptive")
TEMPERATURES = (1.0, 0.5, 1.5)
ACCEPTANCE = {  # of a draft token if those before it were accepted
    "same": (0.99, 1),
    "good": (0.4, 0.98),
    "useless": (0.05, 0.7),
    "wrong": (0, 0.3),
    "lookup": (0, 0.7),
    "narrow": (0.3, 0.98),
    "wide": (0.3, 0.98),
    "eagle3": (0.3, 0.9),
    "other tokenizer": (0.05, 0.8),
    "two sources": (0.2, 0.9),
    "two sources, eagle3": (0.1, 0.9),
}
TREE = "K=2+4"  # and leaves
TWO_SOURCES = "two sources"  # suffix decoding and the good draft, or a head
FILTERS = {
    "all tokens": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "min-p": {"min_p": 0.15},
    "stop": {"stop_token_ids": {2, 5}},
    "min-new": {"stop_token_ids": {2, 5}, "min_new_tokens": 2},
}
OTHERS = [  # settings, widths of logits and caches beyond those of all drafts and rules
    ("good", "K=4", 1.0, "min-p", "paged"),
    ("useless", "adaptive", 1.0, "stop", "paged"),
    ("good", "K=2", 1.0, "min-new", "paged"),
    ("narrow", "K=4", 1.0, "all tokens", "paged"),
    ("wide", "confidence", 1.0, "top-p", "paged"),
    ("good", "K=4", 1.0, "all tokens", "u8"),
    ("good", "K=2", 1.0, "penalties", "bf16"),
    ("eagle3", "K=2", 1.0, "all tokens", "paged"),
    ("eagle3", "adaptive", 1.5, "penalties", "paged"),
    ("other tokenizer", "K=4", 1.0, "all tokens", "paged"),
    ("other tokenizer", "adaptive", 1.0, "penalties", "paged"),
    ("other tokenizer", "K=2", 1.5, "stop", "stateful"),
    (TWO_SOURCES, "K=4", 1.0, "all tokens", "paged"),
    (TWO_SOURCES, "adaptive", 1.0, "all tokens", "paged"),
    (TWO_SOURCES, "adaptive", 1.5, "penalties", "paged"),
    (TWO_SOURCES, "confidence", 1.0, "stop", "paged"),
    (f"{TWO_SOURCES}, eagle3", "adaptive", 1.0, "all tokens", "paged"),
    ("eagle3", TREE, 1.0, "all tokens", "paged"),
    ("good", TREE, 1.0, "penalties", "paged"),
    ("useless", "K=3+9", 1.5, "stop", "paged"),
    (TWO_SOURCES, TREE, 1.0, "top-p", "paged"),
]
SHORT = [
    ("same", "K=8", 1.0, "top-p", "paged"),
    ("same", "K=1", 0.5, "top-k", "paged"),
    ("same", "confidence", 1.5, "penalties", "paged"),
    ("same", "adaptive", 1.0, "all tokens", "paged"),
    ("good", "K=4", 1.5, "top-k", "paged"),
    ("good", "K=2", 0.5, "all tokens", "stateful"),
    ("good", "confidence", 1.0, "top-p", "paged"),
    ("good", "adaptive", 0.5, "penalties", "paged"),
    ("useless", "K=8", 1.5, "all tokens", "paged"),
    ("useless", "K=2", 1.0, "penalties", "paged"),
    ("useless", "K=1", 0.5, "top-p", "stateful"),
    ("useless", "adaptive", 1.5, "top-k", "paged"),
    ("wrong", "K=4", 0.5, "penalties", "paged"),
    ("wrong", "K=1", 1.0, "all tokens", "paged"),
    ("wrong", "confidence", 0.5, "top-k", "paged"),
    ("wrong", "adaptive", 1.5, "top-p", "paged"),
    ("lookup", "K=2", 1.0, "all tokens", "paged"),
    ("lookup", "adaptive", 1.5, "all tokens", "paged"),
    *OTHERS,
]
LONG = [
    (draft, rule, TEMPERATURES[(i + j) % 3], list(FILTERS)[(3 * i + j) % 4], ("paged", "stateful")[(i + j // 2) % 2])
    for (i, draft), (j, rule) in itertools.product(enumerate(DRAFTS), enumerate(RULES))
] + OTHERS


CHEAP = (("wrong", "K=1"), ("lookup", "K=2"))  # few tokens are drafted


def cases(config):
    """Those that this processor can compute: a CPU without bf16 has no cache in bf16."""
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [case for case in (LONG if config.getoption("--long") else SHORT) if has_bf16 or "bf16" not in case]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(metafunc.config), ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_llamas")
    certain = np.where(np.arange(VOCABULARY) == WRONG, 50, 0).astype(np.float32)
    return {
        "main": save_tiny_llama(folder / "main", seed=1),
        "same": folder / "main",
        "good": save_tiny_llama(folder / "good", seed=1, noise=0.2),
        "useless": save_tiny_llama(folder / "useless", seed=2),
        "wrong": save_tiny_llama(folder / "wrong", seed=3, bias=certain),
        "narrow": save_resized(folder / "narrow", [*range(VOCABULARY - 1)]),
        "wide": save_resized(folder / "wide", [*range(VOCABULARY), 0, 1]),
        "eagle3": save_head(
            folder / "eagle3", fitted(dataclasses.replace(tiny_head(seed=5), layers=ONE_LAYER), tiny_llama(seed=1))
        ),
    }


def save_resized(folder, rows):
    """The good draft with another vocabulary: the tokens in `rows`."""

    def resized(matrix):
        return Matrix(*(part[rows] for part in matrix))

    llama = tiny_llama(seed=1, noise=0.2)
    llama = dataclasses.replace(llama, embedding=resized(llama.embedding), head=resized(llama.head))
    folder.mkdir()
    ov.save_model(llama_ir.build(llama), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


@pytest.fixture(scope="module")
def exact_logits(folders):
    """Logits [V] after a text, recomputed from the first token by the exported model itself."""
    model = ov.Core().compile_model(folders["main"] / "openvino_model.xml", "CPU", EXACT)
    request = model.create_infer_request()

    @functools.cache
    def exact_logits(*tokens):
        n = len(tokens)
        request.reset_state()
        inputs = {"input_ids": np.array([tokens]), "position_ids": np.arange(n)[None]}
        inputs |= {"attention_mask": np.ones((1, n), np.int64), "beam_idx": np.zeros(1, np.int32)}
        return request.infer(inputs)["logits"][0, -1].copy()

    return lambda tokens: exact_logits(*tokens.tolist())


@pytest.fixture(scope="module")
def load(folders):
    """A function of a draft and a backend: a decoder of the tiny main model with it."""
    models, known = {}, {}

    def model(name, backend):
        if (name, backend) not in models:
            models[name, backend] = cached_model.load(
                ModelSpec(folders[name], "CPU", CACHES[backend]), capacity=64, stateful=backend == "stateful"
            )
        return models[name, backend]

    @functools.cache
    def decoder_with_head():
        specs = (ModelSpec(folders[name], "CPU", EXACT) for name in ("main", "eagle3"))
        main, head = eagle3_head.load(*specs, capacity=64)
        return Decoder(main, DraftModelProposer(head, VOCABULARY))

    def load(draft, backend="paged", once=False):
        if draft == "eagle3":
            return decoder_with_head()
        if draft == f"{TWO_SOURCES}, eagle3":
            decoder = decoder_with_head()
            return Decoder(decoder.main, CombinedProposer(SuffixProposer(VOCABULARY), decoder.draft))

        def kept(name):
            one = model(name, backend)
            return ComputedOnce(one, len(PROMPT), known.setdefault(name, {})) if once else one

        main, source = kept("main"), SuffixProposer(VOCABULARY)
        if draft == "other tokenizer":
            source = DraftModelProposer(kept("useless"), VOCABULARY, Retokenizer(shared_letters()))
        elif draft == TWO_SOURCES:
            source = CombinedProposer(source, DraftModelProposer(kept("good"), VOCABULARY))
        elif draft != "lookup":
            source = DraftModelProposer(kept(draft), VOCABULARY)
        return Decoder(main, source)

    return load


def rule(name, draft):
    """A draft-length policy for a draft; an adaptive one gets costs at which most drafts are worth it, and some forward
    passes are padded."""
    if name == "adaptive" and draft == "lookup":
        return LookupDraftLength(Costs(draft=0.0, main={1: 1.0, LONGEST + 1: 3.0}, main_change=0.2))
    if name == "adaptive" and draft.startswith(TWO_SOURCES):  # the draft model costs more, so that copies are worth it
        return CombinedDraftLength(Costs(draft=0.5, main={1: 1.0, LONGEST + 1: 1.5}, main_change=0.2))
    if name == "adaptive":
        return AdaptiveDraftLength(Costs(draft=0.1, main={1: 1.0, LONGEST + 1: 2.0}, main_change=0.2))
    if name == "confidence":
        return ConfidenceDraftLength(0.3)
    return FixedDraftLength(*map(int, name.removeprefix("K=").split("+")))


def settings(temperature=1.0, **more):
    # Longer than what is compared: no rule drafts more than it can use, and K would be 1.
    more = {"ignore_eos": "stop_token_ids" not in more, "max_new_tokens": LENGTH + LONGEST, **more}
    return GenerationConfig(do_sample=True, temperature=temperature, **more)


def exact_cells(exact_logits, config, length=LENGTH, later=None):
    """With `later`, a config: as if the tokens after the first one were sampled with that config."""
    first, later = (Distribution(SamplingParams.resolve(one)) for one in (config, later or config))

    def next_token(generated):
        generated = np.array(generated, np.int64)
        logits = exact_logits(np.concatenate([PROMPT, generated]))
        return (later if len(generated) else first)(logits, PROMPT, generated)

    return exact_joint(next_token, length, stop_token_ids=config.stop_token_ids)


def sample(decoder, config, draws, length=LENGTH, seed=1):
    """The first tokens of so many texts, and the acceptance of a draft token if those before it were accepted."""
    decoder.reset(seed=seed)
    drawn, proposed, accepted = [], [], []
    for i in range(draws):
        if i % 500 == 0:
            for _ in decoder.stream(OTHER_PROMPT, config):
                pass
        steps = decoder.stream(PROMPT, config)
        tokens = next(steps).tokens
        while len(tokens) < length and (step := next(steps, None)):  # or a stop token
            tokens += step.tokens
            proposed.append(step.proposed)
            accepted.append(len(step.tokens) - 1 - step.ends_in_leaf)
        steps.close()
        drawn.append(tokens[:length])
    return drawn, per_token_acceptance(proposed, accepted)


def config_of(case, colder=1.0):
    """The case's config, with its temperature multiplied by a factor."""
    _, _, temperature, filter_, _ = case
    return settings(temperature * colder, **FILTERS[filter_])


def check(case, load, exact, draws):
    """Draw texts and compare them with the cells `exact`: the acceptance and the comparison."""
    draft, rule_name, _, _, backend = case
    decoder = load(draft, backend, once=draws < DRAWS_LONG and backend == "paged")
    decoder.draft_length = rule(rule_name, draft)
    drawn, acceptance = sample(decoder, config_of(case), draws)
    comparison = compare(drawn, exact)
    print(f"{'-'.join(map(str, case))}: acceptance {acceptance:.2f}, {comparison}")
    return acceptance, comparison


@pytest.fixture(scope="module")
def checked(load, exact_logits, pytestconfig):
    """A function of a case: what `check` returns, drawn once."""
    draws = DRAWS_LONG if pytestconfig.getoption("--long") else DRAWS
    return functools.cache(lambda case: check(case, load, exact_cells(exact_logits, config_of(case)), draws))


def test_samples_have_the_exact_joint_distribution(case, checked):
    acceptance, comparison = checked(case)
    assert comparison.p_value > FALSE_ALARM
    low, high = ACCEPTANCE[case[0]]
    assert low <= acceptance <= high


@pytest.mark.parametrize("draft", [TWO_SOURCES, f"{TWO_SOURCES}, eagle3"])
def test_both_of_two_sources_draft(draft, load):
    decoder = load(draft)
    decoder.draft_length = rule("adaptive", draft)
    sample(decoder, settings(), draws=500)
    estimate = decoder.draft_length.estimate
    assert estimate.draft_estimate.judged > 20 and estimate.match_estimate.judged > 20


def test_pooled_samples_have_the_exact_joint_distribution(checked, pytestconfig):
    p_value = pooled([checked(case)[1].p_value for case in cases(pytestconfig)])
    print(f"all draws together: p-value {p_value:.2g}")
    assert p_value > pooled_draws.FALSE_ALARM


def test_pooled_test_detects_a_distribution_5_percent_off(exact_logits):
    """With a power of 0.9: as many draws as in a run of the cases above, repeatedly, from the main model's distribution
    with later tokens at a temperature of 0.9 instead of 1.0; and from its own distribution, which passes."""
    right = [exact_cells(exact_logits, config_of(case)) for case in SHORT]
    wrong = [exact_cells(exact_logits, config_of(case), later=config_of(case, 0.9)) for case in SHORT]
    assert 0.03 < np.mean([distance(*pair) for pair in zip(right, wrong, strict=True)]) < 0.06
    assert times_found(right, wrong, DRAWS) >= 45  # of 50
    assert times_found(right, right, DRAWS, below=0.001) <= 2


def test_tokens_after_a_fully_accepted_draft_are_exact(load, exact_logits):
    config = settings(top_k=2)
    decoder = load("good", once=True)
    decoder.draft_length = FixedDraftLength(4)
    drawn, _ = sample(decoder, config, draws=2000, length=6)
    assert compare(drawn, exact_cells(exact_logits, config, length=6)).p_value > FALSE_ALARM


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def verify_with(accepts=lambda p, q: p / q, replacement_row=0, bonus_row=0):
    """rejection_sampling.verify rewritten, with hooks for planting bugs."""

    def verify(drafted, q, p, random):
        for i, x in enumerate(drafted):
            if random.random() >= accepts(p(i)[x], q[i][x]):
                return Acceptance(i, draw(residual(p(i + replacement_row), q[i]), random))
        return Acceptance(len(drafted), draw(p(max(len(drafted) + bonus_row, 0)), random))

    return verify


def nothing(patch):
    patch.setattr(sequence, "verify", verify_with())


def no_residual(patch):
    patch.setattr(rejection_sampling, "residual", lambda p, q: p)


def inverted_ratio(patch):
    patch.setattr(sequence, "verify", verify_with(accepts=lambda p, q: q / p if p else 0))


def accept_all(patch):
    patch.setattr(sequence, "verify", verify_with(accepts=lambda p, q: 1))


def accept_where_main_prefers(patch):
    patch.setattr(sequence, "verify", verify_with(accepts=lambda p, q: p >= q))


def bonus_of_the_row_before(patch):
    patch.setattr(sequence, "verify", verify_with(bonus_row=-1))


def replacement_of_the_next_row(patch):  # as GenAI does
    patch.setattr(sequence, "verify", verify_with(replacement_row=1))


def rollback_that_leaves_one_token(patch):
    run, ends = PagedModel.run, {}

    def off_by_one(self, start, tokens, last, *more):
        start += 0 < start < ends.get(self, 0)
        ends[self] = start + len(tokens)
        return run(self, start, tokens, last, *more)

    patch.setattr(PagedModel, "run", off_by_one)


def stale_cache(patch):
    patch.setattr(CachedModel, "common_prefix", lambda self, tokens: min(self._length, len(tokens)))


def unlikely_draft_tokens_dropped(patch):
    propose = DraftModelProposer.propose

    def sure_only(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal if proposal.q[proposal.token] >= 0.3 else None

    patch.setattr(DraftModelProposer, "propose", sure_only)


def logits_of_another_leaf(patch):
    leaves = Sequence.leaf_positions.fget
    patch.setattr(Sequence, "leaf_positions", property(lambda self: leaves(self)[::-1]))


def token_after_leaf_from_wrong_row(patch):
    verify = Sequence.verify

    def wrong(self, logits):
        rows = self.num_logits
        return verify(self, np.concatenate([logits[:rows], *([logits[leaf.position]] for leaf in self.leaves)]))

    patch.setattr(Sequence, "verify", wrong)


@pytest.mark.parametrize(
    "bug",
    [
        logits_of_another_leaf,
        token_after_leaf_from_wrong_row,
    ],
)
def test_bugs_planted_in_the_draft_tree_are_detected(bug, load, exact_logits, monkeypatch):
    bug(monkeypatch)
    case = ("eagle3", TREE, 1.0, "all tokens", "paged")
    assert check(case, load, exact_cells(exact_logits, config_of(case)), 3000)[1].p_value < FALSE_ALARM


def draft_probabilities_of_another_temperature(patch):
    propose = DraftModelProposer.propose

    def sharpened(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal._replace(q=proposal.q**2 / (proposal.q**2).sum())

    patch.setattr(DraftModelProposer, "propose", sharpened)


def draft_probabilities_of_its_whole_vocabulary(patch):
    """With another tokenizer: a shared token's share of all tokens instead of the shared ones."""
    propose = DraftModelProposer.propose

    def smaller(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal._replace(q=proposal.q * np.float32(0.6))

    patch.setattr(DraftModelProposer, "propose", smaller)


def penalties_that_forget_the_last_token(patch):
    call = Distribution.__call__

    def wrong(self, logits, prompt, generated, *targets):
        return call(self, logits, prompt, generated[:-1], *targets)

    patch.setattr(Distribution, "__call__", wrong)


BUGS = [
    no_residual,
    inverted_ratio,
    accept_all,
    accept_where_main_prefers,
    bonus_of_the_row_before,
    replacement_of_the_next_row,
    rollback_that_leaves_one_token,
    stale_cache,
    unlikely_draft_tokens_dropped,
    draft_probabilities_of_another_temperature,
    draft_probabilities_of_its_whole_vocabulary,
    penalties_that_forget_the_last_token,
]


def colder_later_tokens(patch):
    call = Distribution.__call__

    def wrong(self, logits, prompt, generated, *targets):
        return call(self, logits / np.float32(0.9) if len(generated) else logits, prompt, generated, *targets)

    patch.setattr(Distribution, "__call__", wrong)


def test_pooled_cases_detect_slightly_cold_later_tokens(load, exact_logits, monkeypatch):
    """A bug planted in the engine that a single case may miss."""
    cases = [case for case in SHORT if case[3] in ("min-p", "min-new") or case[:2] in CHEAP]
    exact = {case: exact_cells(exact_logits, config_of(case)) for case in cases}
    colder_later_tokens(monkeypatch)
    p_values = [check(case, load, exact[case], 2 * DRAWS)[1].p_value for case in cases]
    print(f"colder later tokens: p-values {p_values}, together {pooled(p_values):.2g}")
    assert pooled(p_values) < 1e-4  # a sixth of all cases


def p_value_with(bug, load, exact_logits, monkeypatch, draws=2000):
    """Compare at most `draws` samples; stop as soon as an error shows."""
    config = settings(**FILTERS["penalties"])
    cells = exact_cells(exact_logits, config)
    decoder = load("good", once=bug not in (rollback_that_leaves_one_token, stale_cache))
    decoder.draft_length = FixedDraftLength(1)  # so that the token after a fully accepted draft is compared, too
    bug(monkeypatch)
    drawn = []
    for seed in range(draws // LOOK):
        drawn += sample(decoder, config, LOOK, seed=seed)[0]
        comparison = compare(drawn, cells)
        if comparison.p_value < FALSE_ALARM:  # most bugs show at once
            break
    print(bug.__name__, len(drawn), "draws", comparison)
    return comparison.p_value


def copy_replaces_unlikely_draft_token(patch):
    """With two sources: the choice depends on the draft model's token, which is taken back."""
    propose, suffix = DraftModelProposer.propose, SuffixProposer(VOCABULARY)

    def wrong(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal if proposal.q[proposal.token] >= 0.3 else suffix.propose(tokens, transform, random)

    patch.setattr(DraftModelProposer, "propose", wrong)


def copies_treated_as_sampled(patch):
    """With two sources: a distribution of the other kind."""
    propose = SuffixProposer.propose

    def wrong(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal and proposal._replace(q=np.full(VOCABULARY, 1 / VOCABULARY, np.float32))

    patch.setattr(SuffixProposer, "propose", wrong)


@pytest.mark.parametrize("bug", [copy_replaces_unlikely_draft_token, copies_treated_as_sampled])
def test_bugs_planted_in_the_choice_of_source_are_detected(bug, load, exact_logits, monkeypatch):
    bug(monkeypatch)
    if bug is copies_treated_as_sampled:
        monkeypatch.setattr(combined, "TRUSTED", 0.3)  # the texts are too short for long matches
    case = (TWO_SOURCES, "K=4", 1.0, "all tokens", "paged")
    assert check(case, load, exact_cells(exact_logits, config_of(case)), 2000)[1].p_value < FALSE_ALARM


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug, load, exact_logits, monkeypatch):
    draws = 5000 if bug is penalties_that_forget_the_last_token else 2000  # which changes few texts
    assert p_value_with(bug, load, exact_logits, monkeypatch, draws) < FALSE_ALARM


def test_check_passes_without_a_planted_bug(load, exact_logits, monkeypatch):
    assert p_value_with(nothing, load, exact_logits, monkeypatch) > FALSE_ALARM
