"""Text that follows a grammar has exactly the main model's distribution under the grammar, from every source of drafts.

The reference knows no grammar: a language is the set of its words, and a token is allowed if some word goes on like
that. Samples of the engine are compared with the joint distribution of the main model's logits at allowed tokens only,
computed without a draft and without a cache. For one text at a time, the engine computes the logits after a text once:
there are few such texts.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import threading

import jsonschema
import numpy as np
import openvino_genai
import pytest
from openvino_genai import GenerationConfig, StructuredOutputConfig

from speculative import decoder as engine
from speculative.batch_decoder import BatchDecoder
from speculative.batch_decoder import load as load_batch
from speculative.decoder import Decoder
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.combined import CombinedProposer
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.retokenizer import Retokenizer
from speculative.drafting.suffix import SuffixProposer
from speculative.models import cached_model, eagle3_head
from speculative.models.batch_model import BatchModel
from speculative.models.eagle3_batch import BatchHead
from speculative.models.spec import ModelSpec
from speculative.sampling import grammar
from speculative.sampling.distribution import Distribution
from speculative.sampling.grammar import GrammarState, Mask
from speculative.sampling.lossless_check import compare, exact_joint
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import OneHot
from speculative.sequence import sequence
from tests.support.computed_once import ComputedOnce
from tests.support.languages import REGEXES, STOP, allowed_after, grammars, words
from tests.support.letters import shared_letters
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.steps import finish
from tests.support.tiny_eagle3 import fitted, save_head, tiny_head
from tests.support.tiny_llama import VOCABULARY, save_tiny_llama, tiny_llama

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
PROMPT = np.array([1, 5, 2, 6, 3, 0])
LENGTH = 4  # tokens compared
DRAWS = 600
LOOK = 250  # draws with a planted bug between one comparison and the next
FALSE_ALARM = 1e-7  # the probability that a correct engine fails one comparison
SOURCES = ("none", "good", "useless", "lookup", "two sources", "eagle3", "other tokenizer")
SETTINGS = {
    "plain": {},
    "hot": {"temperature": 1.5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "min-new": {"min_new_tokens": 2},
}
CASES = [
    (source, name, list(SETTINGS)[(i + j) % 5])
    for i, source in enumerate(SOURCES)
    for j, name in enumerate(REGEXES)
    if source in ("good", "lookup") or (i + j) % 2
] + [("good", "optional end", "min-new")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["read_file", "write_file"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "done"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_llamas")
    folders = {
        "main": save_tiny_llama(folder / "main", seed=1),
        "good": save_tiny_llama(folder / "good", seed=1, noise=0.2),
        "useless": save_tiny_llama(folder / "useless", seed=2),
    }
    head = fitted(dataclasses.replace(tiny_head(seed=5), layers=[0, 0, 0]), tiny_llama(seed=1))
    models = {name: cached_model.load(ModelSpec(path, "CPU", EXACT), capacity=2048) for name, path in folders.items()}
    specs = [ModelSpec(path, "CPU", EXACT) for path in (folders["main"], save_head(folder / "eagle3", head))]
    models["eagle3"] = eagle3_head.load(*specs, capacity=2048)
    return models


@pytest.fixture(scope="module")
def load(models):
    known = {name: ComputedOnce(models[name], len(PROMPT), {}) for name in ("main", "good", "useless")}

    def load(source, draft_length=3):
        main, suffix = known["main"], SuffixProposer(VOCABULARY)
        if source == "eagle3":
            main, draft = models["eagle3"][0], DraftModelProposer(models["eagle3"][1], VOCABULARY)
        elif source == "two sources":
            draft = CombinedProposer(suffix, DraftModelProposer(known["good"], VOCABULARY))
        elif source == "other tokenizer":
            draft = DraftModelProposer(known["useless"], VOCABULARY, Retokenizer(shared_letters()))
        else:
            draft = {"none": None, "lookup": suffix}.get(source)
            if source in known:
                draft = DraftModelProposer(known[source], VOCABULARY)
        decoder = Decoder(main, draft, FixedDraftLength(draft_length))
        decoder.grammars = grammars()
        return decoder

    return load


@pytest.fixture(scope="module")
def logits(models):
    """The main model's logits [V] after the prompt and some tokens, computed without a cache."""

    @functools.cache
    def logits(*tokens):
        models["main"].reset()
        return models["main"].logits(np.concatenate([PROMPT, np.array(tokens, np.int64)]))[0].copy()

    return logits


def config_of(name, more=None, **options):
    structure = {"structured_output_config": StructuredOutputConfig(regex=REGEXES[name])} if name else {}
    options = {"do_sample": True, "max_new_tokens": 9, "stop_token_ids": {STOP}, **(more or {}), **options}
    return GenerationConfig(**structure, **options)


@functools.cache
def words_of(name):
    return words(REGEXES[name])


def exact_cells(logits, name, setting, length=LENGTH):
    """A text that can only end there is written with a stop token. Without a name, there is no grammar."""
    language = words_of(name) if name else None
    transform = Distribution(SamplingParams.resolve(config_of(None, SETTINGS[setting])))

    def next_token(generated):
        allowed = [*range(VOCABULARY)] if language is None else allowed_after(language, generated)
        if allowed == [STOP]:
            return OneHot(STOP, VOCABULARY)
        masked = np.full(VOCABULARY, -np.inf, np.float32)
        masked[allowed] = logits(*generated)[allowed]
        return transform(masked, PROMPT, np.array(generated, np.int64))

    return exact_joint(next_token, length, stop_token_ids={STOP})


def as_cell(tokens, reason, length=LENGTH):
    if reason == "stop" and tokens[-1] != STOP:
        tokens = [*tokens, STOP]
    return tokens[:length]


def sample(decoder, config, draws, seed=1):
    decoder.reset(seed)
    results = [decoder.generate(PROMPT, config) for _ in range(draws)]
    return [as_cell(result.tokens, result.finish_reason) for result in results]


def check(load, logits, source, name, setting, draws=DRAWS):
    drawn = sample(load(source), config_of(name, SETTINGS[setting]), draws)
    comparison = compare(drawn, exact_cells(logits, name, setting))
    print(source, name, setting, comparison)
    return comparison


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_samples_under_a_grammar_have_the_exact_joint_distribution(case, load, logits):
    comparison = check(load, logits, *case)
    assert not comparison.impossible and comparison.p_value > FALSE_ALARM


# ---- many requests --------------------------------------------------------------------------------------------------


def batch(models, source):
    main = BatchModel(models["eagle3"][0] if source == "eagle3" else models["main"], 64)
    draft = {"eagle3": lambda: BatchHead(models["eagle3"][1], main, 64), "none": lambda: None, "lookup": lambda: None}
    draft = draft.get(source, lambda: BatchModel(models["good"], 64))()
    suffix = SuffixProposer(VOCABULARY) if source in ("lookup", "two sources") else None
    curves = (LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: 0.2, 64: 0.4}), LatencyCurve({1: 0.1, 64: 0.2}))
    decoder = BatchDecoder(main, draft, BatchDraftLength(*curves), suffix=suffix)
    decoder.grammars = grammars()
    return decoder


FIXED = {"num_assistant_tokens": 3}
SHORT = [("none", {}), ("good", {}), ("lookup", FIXED), ("two sources", {}), ("eagle3", FIXED)]
LONG = [("good", FIXED), ("lookup", {}), ("two sources", FIXED), ("eagle3", {})]


@pytest.mark.parametrize(
    ("source", "options"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_concurrent_samples_with_and_without_grammars_are_exact(source, options, models, logits):
    decoder, random, drawn = batch(models, source), np.random.default_rng(3), {}
    cases = [*zip(REGEXES, SETTINGS, strict=False), (None, "plain")]
    shuffled = [case for case in cases for _ in range(300)]
    random.shuffle(shuffled)
    for first in range(0, len(shuffled), 20):
        requests = []
        for name, setting in shuffled[first : first + 20]:
            name = name if name in REGEXES else None
            request = decoder.add_request(PROMPT, config_of(name, SETTINGS[setting], **options))
            request.sequence.random = np.random.default_rng(int(random.integers(2**60)))
            requests.append((name, setting, request))
        finish(decoder)
        for name, setting, request in requests:
            assert not request.error
            result = request.result
            drawn.setdefault((name, setting), []).append(as_cell(result.tokens, result.finish_reason))
    for (name, setting), texts in drawn.items():
        comparison = compare(texts, exact_cells(logits, name, setting))
        assert not comparison.impossible and comparison.p_value > FALSE_ALARM, (name, setting, comparison)


def test_seeded_text_is_unaffected_by_requests_with_the_same_prefix(models):
    """Those wait for its draft after tokens that the grammar forces, and then sample the same tokens."""
    structure = StructuredOutputConfig(regex="d[abc]dedededede[abc]d")
    config = GenerationConfig(max_new_tokens=14, do_sample=True, structured_output_config=structure)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 25).tolist()

    def texts(*seeds):
        decoder = batch(models, "good")
        requests = [decoder.add_request(prompt, config, seed=seed) for seed in seeds]
        finish(decoder)
        return [request.result.tokens for request in requests]

    for seed in range(20):
        assert texts(100 + seed, seed, seed) == texts(100 + seed) + texts(seed) * 2


def test_nothing_follows_the_last_token_that_a_grammar_allows(models, tmp_path):
    """Not even a stop token, which this main model prefers there."""
    main, folder = models["useless"], save_tiny_llama(tmp_path / "good", seed=2, noise=0.2)
    draft = cached_model.load(ModelSpec(folder, "CPU", EXACT), capacity=2048)
    decoders = [Decoder(main), Decoder(main, DraftModelProposer(draft, VOCABULARY), FixedDraftLength(4))]
    batched = batch({"main": main, "good": draft}, "good")
    for decoder in decoders:
        decoder.grammars = batched.grammars
    accepted = 0
    for first in range(VOCABULARY):
        prompt = [1, first, 3, 5, 3, 1, first]
        config = GenerationConfig(max_new_tokens=20, stop_token_ids={2}, num_assistant_tokens=4, logprobs=1)
        config.structured_output_config = StructuredOutputConfig(regex="[acd][abce][bcd][ae]")
        alone, drafted = (decoder.generate(prompt, config) for decoder in decoders)
        request = batched.add_request(prompt, config)
        finish(batched)
        assert alone.tokens == drafted.tokens == request.result.tokens
        assert len(drafted.logprobs) == len(drafted.tokens) and drafted.finish_reason == "stop"
        accepted += sum(drafted.accepted)
    assert accepted > 10


def test_request_that_no_token_can_continue_ends_alone(models):
    """No token spells x, which is detected only after "ab"."""
    decoder = batch(models, "good")
    structure = StructuredOutputConfig(regex="ab(x|xe)")
    greedy = GenerationConfig(max_new_tokens=5, structured_output_config=structure)
    bad, good = decoder.add_request(PROMPT, greedy), decoder.add_request(PROMPT, config_of("forced tokens"))
    finish(decoder)
    assert "no token of the model can continue the text as the grammar demands" in str(bad.error)
    assert not good.error and good.result.finish_reason == "stop"


def test_request_with_too_complex_grammar_ends_alone(models, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 60)
    decoder = batch(models, "good")
    exploding = StructuredOutputConfig(regex="(a|b|c|d)*a(a|b|c|d){12}")
    bad = decoder.add_request(PROMPT, config_of(None, structured_output_config=exploding, max_new_tokens=500), seed=1)
    others = [decoder.add_request(PROMPT, config_of(name)) for name in ("forced tokens", None)]
    finish(decoder)
    assert str(bad.error).startswith("structured_output_config is too complex for this text: ")
    assert not any(other.error for other in others) and all(other.result.tokens for other in others)


# ---- models that write code -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The embedded draft, which is fast, alone and with a noisy copy of it as its draft, in exact arithmetic."""
    exact = {"EXECUTION_MODE_HINT": "ACCURACY"}
    noisy = save_noisy_draft(tmp_path_factory.mktemp("noisy"))
    main, draft = ModelSpec(DRAFT, "CPU", exact), ModelSpec(noisy, "CPU", exact)
    return (
        engine.load(main),
        engine.load(main, draft),
        engine.load(main, draft, max_ngram_size=8),
        load_batch(main, draft),
    )


def json_config(**options):
    structure = StructuredOutputConfig(json_schema=json.dumps(SCHEMA))
    return GenerationConfig(max_new_tokens=60, structured_output_config=structure, **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_json_output_follows_its_schema(options, pair):
    _, decoder, combined, batch_decoder = pair
    results = [
        one.generate("def f(x):\n", json_config(**options), seed=seed) for one in (decoder, combined) for seed in (1, 2)
    ]
    requests = [batch_decoder.add_request("def f(x):\n", json_config(**options), seed=seed) for seed in (1, 2)]
    finish(batch_decoder)
    for result in (*results, *(request.result for request in requests)):
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), SCHEMA)
    assert any(sum(result.accepted) for result in results)


GRAMMARS = {
    "json": {"json_schema": json.dumps(SCHEMA)},
    "free json": {"json_schema": '{"type": "object"}'},
    "regex": {"regex": "[A-Z][a-z]+ [a-z]+( and [a-z]+){2}\\."},
    "ebnf": {"grammar": 'root ::= "def " name "(" args? "):"\nname ::= [a-z_]+\nargs ::= name (", " name)*'},
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_greedy_tokens_with_a_draft_equal_those_without(name, pair):
    alone, *others, batch_decoder = pair
    config = GenerationConfig(max_new_tokens=40, structured_output_config=StructuredOutputConfig(**GRAMMARS[name]))
    expected = alone.generate("def read(path):", config)
    request = batch_decoder.add_request("def read(path):", config)
    plain = batch_decoder.add_request("def read(path):", GenerationConfig(max_new_tokens=40))
    finish(batch_decoder)
    assert request.result.tokens == expected.tokens
    assert plain.result.tokens == alone.generate("def read(path):", GenerationConfig(max_new_tokens=40)).tokens
    for decoder in others:
        assert decoder.generate("def read(path):", config).tokens == expected.tokens


def test_greedy_text_equals_that_of_genai(pair):
    pipeline = openvino_genai.LLMPipeline(DRAFT, "CPU", EXECUTION_MODE_HINT="ACCURACY")
    for name in ("regex", "ebnf"):
        config = GenerationConfig(max_new_tokens=40, structured_output_config=StructuredOutputConfig(**GRAMMARS[name]))
        expected = pipeline.generate(["def read(path):"], config).texts[0]
        assert pair[1].generate("def read(path):", config).text == expected


def test_forced_tokens_are_drafted_without_the_draft_model(pair, monkeypatch):
    """The text equals that without such drafts, with fewer forward passes of the main and the draft model."""
    alone, decoder, *_ = pair
    free = [one.generate("def f(x):\n", json_config()) for one in (alone, decoder)]
    assert free[0].tokens == free[1].tokens
    assert all("excludes iterations with tokens that the grammar forces" in one.draft_length for one in free)
    assert sum(free[0].accepted) > len(free[0].tokens) / 3 and len(free[1].gained) <= len(free[0].gained)
    monkeypatch.setattr(sequence, "MAX_FORCED", 0)
    plain = alone.generate("def f(x):\n", json_config())
    assert plain.tokens == free[0].tokens and not sum(plain.proposed)


def test_draft_shares_no_blocks_of_rejected_forced_tokens():
    """The grammar drafts tokens before the draft model reads the prompt. Here another request wrote the same tokens, so
    that their block is shared, and the main model rejects the second one of them."""
    batch = load_batch(MAIN, DRAFT, cache_tokens=2048)
    config = GenerationConfig(max_new_tokens=24, num_assistant_tokens=2)
    config.structured_output_config = StructuredOutputConfig(regex="the quick brown fox jumps [a-z ]{30,40}")
    prompt = np.arange(300, 394)  # the second token after it ends a block
    the, quick, b = batch.tokenizer.encode("the quick b", add_special_tokens=False).input_ids.data[0].tolist()

    def answer(bias):
        request = batch.add_request(prompt, config, logit_bias={the: 100.0, **bias})
        finish(batch)
        return request.result.tokens

    assert answer({quick: 100.0, b: 100.0})[:3] == [the, quick, b]
    rejecting = answer({quick: -100.0})
    assert rejecting[0] == the and rejecting[1] != quick and len(rejecting) == 24


def test_llguidance_is_imported_only_on_request():
    program = (
        "import sys; from speculative import load; from openvino_genai import *; d = load(sys.argv[1]); "
        "d.generate('def', GenerationConfig(max_new_tokens=2)); print('llguidance' in sys.modules); "
        "structure = StructuredOutputConfig(regex='a+'); "
        "d.generate('def', GenerationConfig(max_new_tokens=2, structured_output_config=structure)); "
        "print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, DRAFT], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "True"]


def test_mask_thread_runs_only_for_requests_with_a_grammar(pair):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("masks")}

    decoder, before = Decoder(pair[0].main, tokenizer=pair[0].tokenizer), threads()
    free = decoder.generate("def f(x):\n", GenerationConfig(max_new_tokens=5))
    assert len(free.tokens) == 5 and threads() <= before
    decoder.generate("def f(x):\n", json_config())
    assert len(threads() - before) == 1


def test_all_masks_are_ready_when_the_forward_pass_ends(pair, monkeypatch):
    """`verify` computes none itself, whatever was drafted."""
    by = []
    compute = GrammarState._compute_mask
    monkeypatch.setattr(
        GrammarState, "_compute_mask", lambda self: by.append(threading.current_thread().name) or compute(self)
    )
    for decoder in (
        pair[0],
        Decoder(pair[0].main, SuffixProposer(pair[0].main.vocab_size), tokenizer=pair[0].tokenizer),
    ):
        result = decoder.generate("def f(x):\n", json_config())
        assert sum(result.proposed) and len(by) > len(result.tokens) / 2
        assert all(name.startswith("masks") for name in by[1:])  # the first is that of the compiler
        by.clear()


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def draft_without_mask(patch):
    """The mask is applied to p only: what the draft proposes is forbidden, or has another probability than it says."""
    propose = DraftModelProposer.propose

    def wrong(self, tokens, transform, random):
        free = Distribution(dataclasses.replace(transform.__self__.params, grammar=None))

        def unmasked(logits, text, targets):
            return free(logits, PROMPT, text[len(PROMPT) :], targets, VOCABULARY)

        return propose(self, tokens, unmasked, random)

    patch.setattr(DraftModelProposer, "propose", wrong)


def mask_not_rolled_back(patch):
    def forward_only(self, generated):
        self._masks.clear()
        self._matcher.try_consume_tokens(generated[self._consumed :].tolist())
        self._consumed = len(generated)
        return not any(token == STOP for token in generated)

    patch.setattr(GrammarState, "_advance", forward_only)


def mask_of_previous_token(patch):
    mask = GrammarState.mask
    patch.setattr(GrammarState, "mask", lambda self, generated: mask(self, generated[:-1]))


def end_allowed_anywhere(patch):
    compute = GrammarState._compute_mask

    def with_end(self):
        mask = compute(self)
        return Mask.of(np.array([token in mask or token == STOP for token in range(VOCABULARY)]))

    patch.setattr(GrammarState, "_compute_mask", with_end)


def mask_of_rejected_draft_kept(patch):
    see = GrammarState._drop_stale_masks

    def keeps(self, generated):
        kept = dict(self._masks)
        see(self, generated)
        self._masks = kept

    patch.setattr(GrammarState, "_drop_stale_masks", keeps)


def only_canonical_tokenization(patch):
    """As llguidance does by default: where the text is certain, the tokenizer's tokens of it are forced."""
    patch.setattr(grammar, "OPTIONS", "")


BUGS = [
    only_canonical_tokenization,
    draft_without_mask,
    mask_not_rolled_back,
    mask_of_previous_token,
    end_allowed_anywhere,
    mask_of_rejected_draft_kept,
]


def is_wrong(decoder, name, cells):
    """Whether one of at most 1,500 draws is impossible or fails, or their distribution is not that of the cells."""
    drawn = []
    for seed in range(1500 // LOOK):
        try:
            drawn += sample(decoder, config_of(name), LOOK, seed)
        except (ValueError, StopIteration) as error:
            print(name, error)
            return True
        comparison = compare(drawn, cells)
        if comparison.impossible or comparison.p_value < FALSE_ALARM:  # most bugs show at once
            print(name, len(drawn), "draws", comparison)
            return True
    return False


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug, load, logits, monkeypatch):
    bug(monkeypatch)
    names = ("forbidden tokens", "optional end", "forced tokens")
    assert any(is_wrong(load("good"), name, exact_cells(logits, name, "plain")) for name in names)
