"""Drawn texts have exactly the main model's distribution, with any draft, rule, temperature and filter, on real IRs.

20,000 draws of the first three tokens for each draft, in four settings, against their exact joint distribution, which
is computed from the exported model itself, run anew for every text, without our cache. The same check finds every bug
planted in the engine.

    pytest tests/test_lossless_draws.py --long

draws 20,000 texts with every draft and every rule; temperatures, filters and caches take turns.
"""

import itertools

import numpy as np
import openvino as ov
import pytest
from openvino_genai import GenerationConfig
from tiny_llama import VOCABULARY, save_tiny_llama

from speculative import cached_model, growing_text, rejection_sampling
from speculative.cached_model import CachedModel
from speculative.decoder import Decoder
from speculative.distribution import Distribution
from speculative.draft_length import LONGEST, AdaptiveDraftLength, ConfidenceDraftLength, Costs, FixedDraftLength
from speculative.draft_source import ModelDraft, PromptLookup
from speculative.lossless_check import compare, exact_joint
from speculative.metrics import per_token_acceptance
from speculative.paged_model import PagedModel
from speculative.rejection_sampling import Verdict, draw, residual

DRAWS, DRAWS_LONG = 2_000, 20_000  # of each case
LENGTH = 3  # tokens compared
PROMPT = np.array([1, 5, 2, 7, 3, 0])
OTHER_PROMPT = np.array([1, 5, 2, 4, 6, 3])  # between draws now and then: another text, the same beginning
WRONG = 6  # the token that the wrong draft is certain of
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
FALSE_ALARM = 2e-8  # the chance that a right engine fails one comparison: one run of all in a million

DRAFTS = ("same", "good", "useless", "wrong", "lookup")
RULES = ("K=1", "K=2", "K=4", "K=8", "confidence", "adaptive")
TEMPERATURES = (1.0, 0.5, 1.5)
ACCEPTANCE = {  # of a draft token if those before it were: a draft is what it is called
    "same": (0.99, 1),
    "good": (0.4, 0.98),
    "useless": (0.05, 0.7),
    "wrong": (0, 0.3),
    "lookup": (0, 0.7),
}
FILTERS = {
    "all tokens": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}
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
]
LONG = [
    (draft, rule, TEMPERATURES[(i + j) % 3], list(FILTERS)[(3 * i + j) % 4], ("paged", "stateful")[(i + j // 2) % 2])
    for (i, draft), (j, rule) in itertools.product(enumerate(DRAFTS), enumerate(RULES))
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = LONG if metafunc.config.getoption("--long") else SHORT
        metafunc.parametrize("case", cases, ids=["-".join(map(str, case)) for case in cases])


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
    }


@pytest.fixture(scope="module")
def exact_logits(folders):
    """Logits [V] after a text, by the exported model as it is, from the first token on."""
    model = ov.Core().compile_model(folders["main"] / "openvino_model.xml", "CPU", EXACT)
    request = model.create_infer_request()

    def exact_logits(tokens):
        n = len(tokens)
        request.reset_state()
        inputs = {"input_ids": tokens[None], "position_ids": np.arange(n)[None]}
        inputs |= {"attention_mask": np.ones((1, n), np.int64), "beam_idx": np.zeros(1, np.int32)}
        return request.infer(inputs)["logits"][0, -1].copy()

    return exact_logits


@pytest.fixture(scope="module")
def load(folders):
    """A function of a draft and a backend: a decoder of the tiny main model with it."""
    models = {}

    def model(name, backend):
        if (name, backend) not in models:
            models[name, backend] = cached_model.load(
                folders[name], "CPU", EXACT, capacity=64, stateful=backend == "stateful"
            )
        return models[name, backend]

    def load(draft, backend="paged"):
        source = PromptLookup(VOCABULARY) if draft == "lookup" else ModelDraft(model(draft, backend), VOCABULARY)
        return Decoder(model("main", backend), source)

    return load


def rule(name):
    """A draft length rule; the adaptive one is told costs at which most drafts pay."""
    if name == "adaptive":
        return AdaptiveDraftLength(Costs(draft=0.1, main={1: 1.0, LONGEST + 1: 2.0}))
    if name == "confidence":
        return ConfidenceDraftLength(0.3)
    return FixedDraftLength(int(name.removeprefix("K=")))


def settings(temperature=1.0, **more):
    # Longer than what is compared: no rule drafts more than it can use, and K would be 1.
    return GenerationConfig(
        do_sample=True, ignore_eos=True, max_new_tokens=LENGTH + LONGEST, temperature=temperature, **more
    )


def exact_cells(exact_logits, config, length=LENGTH):
    transform = Distribution(config)

    def next_token(generated):
        generated = np.array(generated, np.int64)
        return transform(exact_logits(np.concatenate([PROMPT, generated])), PROMPT, generated)

    return exact_joint(next_token, length)


def sample(decoder, config, draws, length=LENGTH):
    """The first tokens of so many texts, and the acceptance of a draft token if those before it were accepted."""
    decoder.reset(seed=1)
    drawn, proposed, gained = [], [], []
    for i in range(draws):
        if i % 500 == 0:
            for _ in decoder.stream(OTHER_PROMPT, config):
                pass
        steps = decoder.stream(PROMPT, config)
        tokens = next(steps).tokens
        while len(tokens) < length:
            step = next(steps)
            tokens += step.tokens
            proposed.append(step.proposed)
            gained.append(len(step.tokens))
        steps.close()
        drawn.append(tokens[:length])
    return drawn, per_token_acceptance(proposed, gained)


def test_draws_have_the_exact_joint_distribution(case, load, exact_logits, pytestconfig):
    draft, rule_name, temperature, filter_, backend = case
    config = settings(temperature, **FILTERS[filter_])
    decoder = load(draft, backend)
    decoder.draft_length = rule(rule_name)
    drawn, acceptance = sample(decoder, config, DRAWS_LONG if pytestconfig.getoption("--long") else DRAWS)
    comparison = compare(drawn, exact_cells(exact_logits, config))
    print(f"{'-'.join(map(str, case))}: acceptance {acceptance:.2f}, {comparison}")
    assert comparison.p_value > FALSE_ALARM
    low, high = ACCEPTANCE[draft]
    assert low <= acceptance <= high


def test_tokens_behind_a_whole_draft_are_right_too(load, exact_logits):
    config = settings(top_k=2)
    decoder = load("good")
    decoder.draft_length = FixedDraftLength(4)
    drawn, _ = sample(decoder, config, draws=2000, length=6)
    assert compare(drawn, exact_cells(exact_logits, config, length=6)).p_value > FALSE_ALARM


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def verify_with(accepts=lambda p, q: p / q, replacement_row=0, bonus_row=0):
    """rejection_sampling.verify written again, with room for bugs."""

    def verify(drafted, q, p, random):
        for i, x in enumerate(drafted):
            if random.random() >= accepts(p(i)[x], q[i][x]):
                return Verdict(i, draw(residual(p(i + replacement_row), q[i]), random))
        return Verdict(len(drafted), draw(p(max(len(drafted) + bonus_row, 0)), random))

    return verify


def nothing(patch):
    patch.setattr(growing_text, "verify", verify_with())


def no_residual(patch):
    patch.setattr(rejection_sampling, "residual", lambda p, q: p)


def inverted_ratio(patch):
    patch.setattr(growing_text, "verify", verify_with(accepts=lambda p, q: q / p if p else 0))


def accept_all(patch):
    patch.setattr(growing_text, "verify", verify_with(accepts=lambda p, q: 1))


def accept_where_main_prefers(patch):
    patch.setattr(growing_text, "verify", verify_with(accepts=lambda p, q: p >= q))


def bonus_of_the_row_before(patch):
    patch.setattr(growing_text, "verify", verify_with(bonus_row=-1))


def replacement_of_the_next_row(patch):  # as GenAI does
    patch.setattr(growing_text, "verify", verify_with(replacement_row=1))


def rollback_that_leaves_one_token(patch):
    run, ends = PagedModel.run, {}

    def off_by_one(self, start, tokens, last):
        start += 0 < start < ends.get(self, 0)
        ends[self] = start + len(tokens)
        return run(self, start, tokens, last)

    patch.setattr(PagedModel, "run", off_by_one)


def stale_cache(patch):
    patch.setattr(CachedModel, "common_prefix", lambda self, tokens: min(self._length, len(tokens)))


def unsure_draft_tokens_taken_back(patch):
    propose = ModelDraft.propose

    def sure_only(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal if proposal.q[proposal.token] >= 0.3 else None

    patch.setattr(ModelDraft, "propose", sure_only)


def draft_probabilities_of_another_temperature(patch):
    propose = ModelDraft.propose

    def sharpened(self, tokens, transform, random):
        proposal = propose(self, tokens, transform, random)
        return proposal._replace(q=proposal.q**2 / (proposal.q**2).sum())

    patch.setattr(ModelDraft, "propose", sharpened)


def penalties_that_forget_the_last_token(patch):
    call = Distribution.__call__
    patch.setattr(
        Distribution, "__call__", lambda self, logits, prompt, generated: call(self, logits, prompt, generated[:-1])
    )


BUGS = [
    no_residual,
    inverted_ratio,
    accept_all,
    accept_where_main_prefers,
    bonus_of_the_row_before,
    replacement_of_the_next_row,
    rollback_that_leaves_one_token,
    stale_cache,
    unsure_draft_tokens_taken_back,
    draft_probabilities_of_another_temperature,
    penalties_that_forget_the_last_token,
]


def p_value_with(bug, load, exact_logits, monkeypatch, draws=3000):
    config = settings(**FILTERS["penalties"])
    cells = exact_cells(exact_logits, config)
    decoder = load("good")
    decoder.draft_length = FixedDraftLength(1)  # so that the token behind a whole draft is compared, too
    bug(monkeypatch)
    drawn, _ = sample(decoder, config, draws)
    comparison = compare(drawn, cells)
    print(bug.__name__, comparison)
    return comparison.p_value


@pytest.mark.parametrize("bug", BUGS)
def test_the_same_check_finds_a_planted_bug(bug, load, exact_logits, monkeypatch):
    assert p_value_with(bug, load, exact_logits, monkeypatch) < FALSE_ALARM


def test_the_check_passes_where_no_bug_is_planted(load, exact_logits, monkeypatch):
    assert p_value_with(nothing, load, exact_logits, monkeypatch) > FALSE_ALARM
