"""Each request of a batch is decoded as it would be alone: tokens, stop conditions, distributions; and all blocks are
freed. The same checks find the bugs planted in the engine.

Everything runs on real models in exact arithmetic (EXECUTION_MODE_HINT=ACCURACY): no near-tie depends on the batch.
"""

import dataclasses
import functools
import itertools
import json

import numpy as np
import openvino
import openvino_genai
import pytest
from openvino_genai import GenerationConfig

from speculative import batch_decoder
from speculative.batch_decoder import BatchDecoder
from speculative.decoder import Decoder
from speculative.drafting.acceptance import AcceptanceEstimate
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.drafting.latency_curve import LatencyCurve
from speculative.drafting.policy import FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import PastAnswers, SuffixProposer
from speculative.modelgen import llama_ir
from speculative.modelgen.llama_ir import Matrix
from speculative.models import cached_model
from speculative.models.batch_model import BatchModel, ScheduledTokens, Slot
from speculative.models.block_pool import BlockPool, OutOfBlocks
from speculative.models.paged_model import PagedModel, SequenceInput, rounded_up
from speculative.models.spec import ModelSpec
from speculative.sampling import rejection_sampling
from speculative.sampling.lossless_check import compare, exact_joint, main_alone
from speculative.sampling.params import SamplingParams
from speculative.sampling.rejection_sampling import Acceptance, draw
from speculative.sequence import sequence
from tests.support import pooled_draws
from tests.support.changed_tokenizer import cleaning_up, only
from tests.support.declined import declined_matches
from tests.support.letters import shared_letters
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT, MAIN, ROOT
from tests.support.pooled_draws import distance, pooled, times_found
from tests.support.steps import finish
from tests.support.tiny_llama import VOCABULARY, save_tiny_llama, tiny_llama
from tests.support.untimed import Untimed

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
TINY = {**EXACT, "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
CODE = ROOT / "scripts/prompts/embedded_code.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in CODE.read_text(encoding="utf-8").splitlines()]
FALSE_ALARM = 2e-8  # the probability that a correct engine fails one comparison
RULES = ({"num_assistant_tokens": 1}, {"num_assistant_tokens": 7}, {"assistant_confidence_threshold": 0.5}, {})


def costs():
    """Costs at which most drafts are worth it."""
    return BatchDraftLength(
        LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: 0.2, 64: 0.4}), LatencyCurve({1: 0.1, 64: 0.2})
    )


@pytest.fixture(scope="module")
def tokenizer():
    return openvino_genai.Tokenizer(str(MAIN))


@pytest.fixture(scope="module")
def noisy_draft(tmp_path_factory):
    return save_noisy_draft(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def models(noisy_draft):
    """The embedded draft, with a noisy copy of it as its draft, and room for four or five texts of 100 tokens."""
    return [cached_model.load(ModelSpec(folder, "CPU", EXACT), capacity=640) for folder in (DRAFT, noisy_draft)]


@pytest.fixture
def make(models, tokenizer):
    main, draft = models

    def make(source="model", context=None):
        model = BatchModel(draft, context) if source in ("model", "two sources") else None
        suffix = {
            "lookup": SuffixProposer(main.vocab_size),
            "past answers": SuffixProposer(main.vocab_size, past=PastAnswers(500)),
            "two sources": SuffixProposer(main.vocab_size, past=PastAnswers(500)),
        }.get(source)
        return BatchDecoder(BatchModel(main, context), model, costs(), tokenizer, frozenset({0}), suffix=suffix)

    return make


@pytest.fixture(scope="module")
def alone(tokenizer):
    """Generations of the main model alone, by the single-request decoder."""
    decoder, known = (
        Decoder(cached_model.load(ModelSpec(DRAFT, "CPU", EXACT)), tokenizer=tokenizer, stop_token_ids=frozenset({0})),
        {},
    )

    def alone(prompt, tokens):
        if (prompt, tokens) not in known:
            config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
            known[prompt, tokens] = decoder.generate(prompt, config).tokens
        return known[prompt, tokens]

    return alone


def greedy(tokens, **options):
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **options)


def blocks_are_back(decoder):
    pools = [model.pool for model in (decoder.main, decoder.draft) if isinstance(model, BatchModel)]
    return all(pool.free == pool.blocks and pool.reserved == 0 for pool in pools)


def test_request_needs_at_most_the_context_length_of_cache(make, monkeypatch):
    decoder = make()
    monkeypatch.setattr(decoder.main, "context", 128)
    assert decoder.has_room(2003) and decoder.add_request([5, 6, 7], greedy(2000)).sequence.max_length == 128


@pytest.mark.parametrize("source", ["model", "lookup", "past answers", "two sources", None])
def test_greedy_tokens_equal_those_of_each_request_alone(source, make, alone, monkeypatch):
    """Requests with different lengths and policies join when there is room, and some are cancelled."""
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 24)  # so that prompts come in pieces
    random = np.random.default_rng(0)
    decoder = make(source)
    wanted = [(prompt, int(random.integers(1, 60)), RULES[i % 4]) for i, prompt in enumerate(PROMPTS[:12])]
    texts, together = [], 0
    while wanted or decoder.has_unfinished_requests:
        if wanted and random.random() < 0.4:
            prompt, tokens, rule = wanted[0]
            if decoder.has_room(len(decoder.encode(prompt)) + tokens):
                texts.append((decoder.add_request(prompt, greedy(tokens, **rule)), prompt, tokens))
                wanted.pop(0)
        gains = decoder.step()
        together = max(together, len(gains))
        going = [request for request, *_ in texts if not request.finished]
        if going and random.random() < 0.03:
            decoder.cancel(going[0])
    assert together >= 3 and len(texts) == 12
    for request, prompt, tokens in texts:
        got = request.result.tokens
        assert request.error is None and request.finished
        assert got == alone(prompt, 60)[: len(got)]
        assert len(got) == tokens or request.result.finish_reason == "cancelled"
    assert sum(request.result.finish_reason == "cancelled" for request, *_ in texts) < 6
    assert blocks_are_back(decoder)
    drafted = sum(sum(request.result.proposed) for request, *_ in texts)
    assert (drafted > 50) == (source is not None)


def test_result_equals_that_of_the_single_request_decoder(make, models, tokenizer):
    config = greedy(40, num_assistant_tokens=3)
    one = Decoder(
        cached_model.load(ModelSpec(DRAFT, "CPU", EXACT)),
        DraftModelProposer(models[1], models[0].vocab_size),
        None,
        tokenizer,
    )
    expected = one.generate(PROMPTS[0], config)
    models[1].reset()
    decoder = make()
    requests = [decoder.add_request(prompt, config) for prompt in PROMPTS[:3]]
    gains = [gain for gain in finish(decoder) if gain.request is requests[0]]
    got = requests[0].result
    for name in ("tokens", "from_draft", "text", "finish_reason", "proposed", "accepted", "gained", "draft_length"):
        assert getattr(got, name) == getattr(expected, name)
    assert list(itertools.chain(*(gain.step.tokens for gain in gains))) == expected.tokens
    assert 0 < got.ttft < got.seconds


def test_requests_end_where_they_would_alone(make, models, tokenizer):
    """Stop tokens, stop strings, max_length and the context's end, all in one batch; streams equal the results."""
    decoder = make(context=200)
    whole = decoder.add_request(PROMPTS[0], greedy(60))
    finish(decoder)
    text, tokens = whole.result.text, whole.result.tokens
    num_prompt_tokens = len(decoder.encode(PROMPTS[0]))
    configs = {
        "token": GenerationConfig(max_new_tokens=60, stop_token_ids={tokens[9]}),
        "string": greedy(60, stop_strings={text[33:40], "never said"}),
        "inside": greedy(60, stop_strings={text[50]}, include_stop_str_in_output=True),
        "length": GenerationConfig(max_length=num_prompt_tokens + 20, ignore_eos=True),
        "whole": greedy(60),
    }
    requests = {name: decoder.add_request(PROMPTS[0], config, stream=True) for name, config in configs.items()}
    streamed = dict.fromkeys(requests, "")
    for gain in finish(decoder):
        name = next(name for name, request in requests.items() if request is gain.request)
        streamed[name] += gain.text
    got = {name: request.result for name, request in requests.items()}
    assert {name: one.text for name, one in got.items()} == streamed
    assert got["token"].tokens == tokens[: tokens.index(tokens[9]) + 1]
    assert streamed["string"] == text[: text.index(text[33:40])]
    assert streamed["inside"] == text[: text.index(text[50]) + 1]
    assert got["length"].tokens == tokens[:20] and streamed["whole"] == text
    ends = {name: one.finish_reason for name, one in got.items()}
    assert ends == {"token": "stop", "string": "stop", "inside": "stop", "length": "length", "whole": "length"}

    prompt = (np.arange(190) * 7 + 3) % 4096
    longest = [
        decoder.add_request(prompt, greedy(100)),
        decoder.add_request(prompt, greedy(100, num_assistant_tokens=16)),
    ]
    finish(decoder)
    assert [len(request.result.tokens) for request in longest] == [10, 10]
    assert blocks_are_back(decoder)


def test_streamed_pieces_join_to_text_with_tokenizer_clean_up(models, tokenizer):
    decoder = BatchDecoder(BatchModel(models[0]), None, costs(), cleaning_up(tokenizer))
    config = greedy(40, do_sample=True, temperature=1.5)
    request = decoder.add_request(PROMPTS[0], config, seed=1, stream=True, logit_bias=only(tokenizer, " ", "."))
    pieces = [gain.text for gain in finish(decoder)]
    as_written = tokenizer.decode(request.result.tokens)
    assert "".join(pieces) == request.result.text == as_written.replace(" .", ".") != as_written


def test_prefill_does_not_stall_running_requests(make, alone, monkeypatch):
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 32)
    decoder = make()
    running = decoder.add_request(PROMPTS[0], greedy(100, num_assistant_tokens=1))
    while not running.result.tokens:
        decoder.step()
    long = decoder.add_request((np.arange(300) * 7 + 3) % 4096, greedy(5))
    iterations = 0
    while not long.result.tokens:
        assert running in [gain.request for gain in decoder.step()]
        iterations += 1
    assert iterations == -(-300 // 32)
    finish(decoder)
    assert running.result.tokens[:60] == alone(PROMPTS[0], 60)


@pytest.mark.parametrize("source", ["past answers", "two sources"])
def test_repeated_answer_is_copied_from_past_answers(source, make, alone):
    """The whole answer is copied, from its first tokens on, if the requests have the same salt."""
    decoder, passes = make(source), []
    for salt in (b"mine", b"mine", b"another's"):
        request = decoder.add_request(PROMPTS[3], greedy(60, num_assistant_tokens=7), salt=salt)
        passes.append(len(finish(decoder)))
        assert request.result.tokens == alone(PROMPTS[3], 60)
    first, again, another = passes
    assert again <= 10 < first == another


def test_seeded_text_with_draft_model_ignores_past_answers(make):
    decoder = make("two sources")
    results = []
    for _ in range(2):
        results.append(decoder.add_request(PROMPTS[0], greedy(60, do_sample=True, temperature=0.7), seed=1).result)
        finish(decoder)
    first, again = results
    assert (again.tokens, again.proposed) == (first.tokens, first.proposed)


@pytest.mark.parametrize("ended", ["cancelled", "failed"])
def test_cancelled_or_failed_request_is_no_past_answer(ended, make):
    decoder = make("past answers")
    request = decoder.add_request(PROMPTS[0], greedy(60))
    for _ in range(5):
        decoder.step()
    if ended == "cancelled":
        decoder.cancel(request)
    else:
        request.error = RuntimeError()
    finish(decoder)
    assert request.result.tokens and not len(decoder.suffix.past.of(b"").tokens)


def test_seeded_request_without_draft_model_follows_batch_policy(make):
    texts = []
    for source in ("lookup", None):
        decoder = make(source)
        request = decoder.add_request(PROMPTS[0], greedy(60, do_sample=True), seed=3)
        assert request.follows_batch
        finish(decoder)
        texts.append(request.result.tokens)
    assert texts[0] == texts[1]


def test_same_seed_gives_same_text_in_any_batch(make):
    config = greedy(40, do_sample=True, temperature=1.1, num_assistant_tokens=3)
    decoder = make()
    quiet = decoder.add_request(PROMPTS[0], config, seed=7)
    finish(decoder)
    others = [decoder.add_request(prompt, greedy(30, do_sample=True), seed=i) for i, prompt in enumerate(PROMPTS[1:3])]
    decoder.step()
    decoder.step()
    crowded = decoder.add_request(PROMPTS[0], config, seed=7)
    other_seed = decoder.add_request(PROMPTS[0], config, seed=8)
    for _ in range(5):
        decoder.step()
    decoder.cancel(others[0])
    finish(decoder)
    assert crowded.result.tokens == quiet.result.tokens != other_seed.result.tokens
    assert crowded.result.proposed == quiet.result.proposed


def test_full_cache_is_reported_before_a_request_starts(make):
    decoder = make()
    room = decoder.main.pool.blocks * 32
    assert decoder.has_room(room)
    config = greedy(room - 40)
    first = decoder.add_request(list(range(1, 41)), config)
    assert not decoder.has_room(1)
    with pytest.raises(
        OutOfBlocks, match=r"^a request of up to 6 tokens needs 1 cache blocks of 32 tokens, but only 0 of 20 "
    ):
        decoder.add_request([5], greedy(5))
    decoder.step()
    decoder.cancel(first)
    (last,) = decoder.step()
    assert last.request is first and last.step.tokens == [] and first.result.finish_reason == "cancelled"
    assert blocks_are_back(decoder) and not decoder.has_unfinished_requests
    decoder.add_request([5], greedy(5))
    finish(decoder)


def test_request_rejected_by_the_draft_cache_frees_main_cache(make):
    decoder = make()
    other = decoder.draft.pool.reserve(640)
    with pytest.raises(OutOfBlocks):
        decoder.add_request([5], greedy(5))
    other.free_blocks()
    assert blocks_are_back(decoder) and not decoder.has_unfinished_requests


@pytest.mark.parametrize(
    ("prompt", "config", "word"),
    [
        ([], greedy(5), "no tokens"),
        (list(range(1, 700)), greedy(5), "699 tokens"),
        ([5], greedy(5, num_beams=4), "num_beams"),
        ([5], greedy(5, num_assistant_tokens=4, tree_depth=2), "tree_depth=2 is not supported for many requests"),
        ([5], greedy(5, do_sample=True, temperature=-1.0), "temperature"),
        ([5000], greedy(5), "5000"),
    ],
)
def test_invalid_request_gives_one_sentence_error(make, prompt, config, word):
    decoder = make()
    with pytest.raises(ValueError, match=word) as error:
        decoder.add_request(prompt, config)
    assert "\n" not in str(error.value) and not decoder.has_unfinished_requests and blocks_are_back(decoder)


def test_model_without_paged_cache_is_rejected():
    with pytest.raises(ValueError, match="batching needs a paged cache, but this model has one of kind 'stateful'"):
        BatchModel(cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), stateful=True))


def test_failing_request_does_not_affect_others(make, alone, monkeypatch):
    """NaN logits end one request; a failed forward pass affects all and can be retried."""
    decoder = make()
    good, bad = decoder.add_request(PROMPTS[0], greedy(30)), decoder.add_request(PROMPTS[1], greedy(30))
    for _ in range(3):
        decoder.step()
    transform = bad.sequence._transform
    monkeypatch.setattr(bad.sequence, "_transform", lambda logits, *text: transform(logits * np.nan, *text))
    (last,) = (gain for gain in decoder.step() if gain.request is bad)
    assert bad.finished and last.step.tokens == [] and "highest logit is nan" in str(bad.error)

    run_together = PagedModel.run_together
    monkeypatch.setattr(PagedModel, "run_together", lambda self, runs, **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.step()
    monkeypatch.setattr(PagedModel, "run_together", run_together)
    finish(decoder)
    assert good.result.tokens == alone(PROMPTS[0], 60)[:30] and blocks_are_back(decoder)


def test_ctrl_c_while_a_finished_request_is_removed_affects_no_other(make, alone, monkeypatch):
    decoder = make()
    short, long = decoder.add_request(PROMPTS[0], greedy(4)), decoder.add_request(PROMPTS[1], greedy(30))
    free_blocks = Slot.free_blocks

    def free_and_interrupt(slot):
        free_blocks(slot)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Slot, "free_blocks", free_and_interrupt)
        finish(decoder)
    assert short.finished and not long.finished
    finish(decoder)
    for request, prompt, tokens in ((short, PROMPTS[0], 4), (long, PROMPTS[1], 30)):
        assert request.result.tokens == alone(prompt, 60)[:tokens] and not request.error
    assert blocks_are_back(decoder)


def test_draft_with_shorter_context_stops_at_its_end(models, tokenizer, alone):
    main, draft = models
    decoder = BatchDecoder(BatchModel(main), BatchModel(draft, 60), costs(), tokenizer)
    requests = [decoder.add_request(prompt, greedy(60, num_assistant_tokens=4)) for prompt in PROMPTS[:2]]
    finish(decoder)
    for request, prompt in zip(requests, PROMPTS, strict=False):
        assert request.result.tokens == alone(prompt, 60)
        assert request.result.proposed[0] == 4 and request.result.proposed[-2] == 0
    assert blocks_are_back(decoder)


def test_load_measures_costs_and_decodes(noisy_draft):
    decoder = batch_decoder.load(DRAFT, noisy_draft, cache_tokens=2048)
    assert decoder.main.context == 1024 and decoder.cache_bytes > 0
    requests = [decoder.add_request(prompt, greedy(20)) for prompt in PROMPTS[:4]]
    finish(decoder)
    assert [len(request.result.tokens) for request in requests] == [20] * 4
    assert not any(request.draft_slot.rows.size for request in requests)  # logits that nobody needs
    assert "adaptive draft length for the batch" in requests[0].result.draft_length and blocks_are_back(decoder)


def test_no_blocks_are_shared_without_prefix_cache(noisy_draft):
    decoder = batch_decoder.load(DRAFT, noisy_draft, cache_tokens=1024, prefix_cache=False)
    decoder.add_request(np.arange(100, 200), greedy(8, num_assistant_tokens=2))
    finish(decoder)
    assert not decoder.main.pool._shared and not decoder.draft.pool._shared


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(max_ngram_size=0), "max_ngram_size is 0"),
        (dict(past_answers=100), "pass max_ngram_size, too"),
        (dict(max_ngram_size=16, past_answers=-1), "past_answers is -1"),
        (dict(max_ngram_size=16, past_answers=1.5), "past_answers is 1.5"),
    ],
)
def test_invalid_draft_sources_are_rejected(options, word):
    with pytest.raises(ValueError, match=word):
        batch_decoder.load(MAIN, **options)


def test_blocks_are_allocated_as_sequences_grow_and_never_twice():
    pool, random = BlockPool(50, 4), np.random.default_rng(0)
    leases = {}
    for _ in range(2000):
        if random.random() < 0.3 and pool.has_room(tokens := int(random.integers(1, 60))):
            leases[pool.reserve(tokens)] = tokens
        elif leases:
            lease = list(leases)[random.integers(len(leases))]
            if random.random() < 0.1:
                lease.free_blocks()
                del leases[lease]
            else:
                before = lease.blocks(1).copy()
                assert (
                    lease.blocks(int(random.integers(1, leases[lease] + 1)))[: len(before)].tolist() == before.tolist()
                )
        taken = [block for lease in leases for block in lease._blocks[: lease._allocated].tolist()]
        assert len(set(taken)) == len(taken) == pool.blocks - pool.free <= pool.reserved <= pool.blocks
    with pytest.raises(OutOfBlocks):
        pool.reserve(4 * 50 + 1)


# ---- many texts at a time, exactly, and planted bugs ----------------------------------------------------------------

TEXTS = {
    (1, 5, 2, 7, 3, 0): {},
    (4, 4, 6) * 13: {"top_p": 0.8},
    (2, 3, 1, 7): {"repetition_penalty": 1.3, "top_k": 6},
    (3, 3, 1): {"min_p": 0.1},
    (5, 1): {"stop_token_ids": {2, 5}, "min_new_tokens": 2},
}
DRAWS = 280  # of each text with each policy
LENGTH = 3  # tokens compared
MAIN_ROOM, DRAFT_ROOM = 2048, 2080  # tokens; different, so that a bug can be planted in one of them


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_llama(folder / "main", seed=1), save_tiny_llama(folder / "good", seed=1, noise=0.2)


@pytest.fixture(scope="module")
def tiny(folders):
    rooms = MAIN_ROOM, DRAFT_ROOM
    return [
        cached_model.load(ModelSpec(folder, "CPU", TINY), capacity=room)
        for folder, room in zip(folders, rooms, strict=True)
    ]


@pytest.fixture(scope="module")
def cells(folders):
    """The exact distribution of the first tokens of each text, by the main model alone."""
    main, exact = cached_model.load(ModelSpec(folders[0], "CPU", TINY), capacity=64), {}
    for prompt, options in TEXTS.items():
        exact[prompt] = exact_cells(main, prompt, options)
    return exact


def exact_cells(main, prompt, options, later=None):
    """With `later`, a temperature: as if the tokens after the first one were sampled at it."""
    config = GenerationConfig(do_sample=True, max_new_tokens=9, **options)
    first = main_alone(main, np.array(prompt), SamplingParams.resolve(config))
    if later:
        config.temperature = later
    others = main_alone(main, np.array(prompt), SamplingParams.resolve(config))
    return exact_joint(
        lambda tokens: (others if tokens else first)(tokens), LENGTH, stop_token_ids=config.stop_token_ids
    )


def decode_concurrently(tiny, requests, suffix=None, shared=None, model=True):
    """The generations of all `requests` (prompt, config, seed), many at a time, joining as others leave. Draft tokens
    come from the draft `model` and from `suffix`; `shared` is for a draft with another tokenizer.

    A failed request has none: with a planted bug, the model may read cache entries that were never written.
    """
    random = np.random.default_rng(0)
    draft = BatchModel(tiny[1], 64) if model else None
    decoder = BatchDecoder(BatchModel(tiny[0], 64), draft, costs(), shared=shared, suffix=suffix)
    waiting, going, most = list(reversed(requests)), 0, 0
    added = []
    while waiting or decoder.has_unfinished_requests:
        while waiting and going < 24 and random.random() < 0.9:
            prompt, config, seed = waiting.pop()
            added.append(decoder.add_request(list(prompt), config))
            added[-1].sequence.random = np.random.default_rng(seed)  # with a seed, the batch policy would not apply
            going += 1
        going -= sum(gain.request.finished for gain in decoder.step())
        most = max(most, going)
    assert most > 12 and blocks_are_back(decoder)
    return [None if request.error else request.result for request in added]


def texts_drawn(tiny, rule, draws, seed=0, **sources):
    """The first tokens of many concurrent requests, `draws` for each prompt; None if a request failed."""
    random = np.random.default_rng(seed)
    prompts = [prompt for prompt in TEXTS for _ in range(draws)]
    random.shuffle(prompts)
    requests = []
    for prompt in map(tuple, prompts):
        length = LENGTH + 1 + int(random.integers(4))  # no rule drafts more than it can use, and K would be 1
        options = {"ignore_eos": "stop_token_ids" not in TEXTS[prompt], **TEXTS[prompt], **rule}
        config = GenerationConfig(do_sample=True, max_new_tokens=length, **options)
        requests.append((prompt, config, int(random.integers(2**60))))
    drawn = {prompt: [] for prompt in TEXTS}
    for (prompt, *_), generation in zip(requests, decode_concurrently(tiny, requests, **sources), strict=True):
        if generation is None:
            return None
        drawn[prompt].append(generation.tokens[:LENGTH])
    return drawn


def p_values(drawn, cells):
    """Compare texts with their exact distributions: one p-value per prompt."""
    return [compare(drawn[prompt], cells[prompt]).p_value for prompt in TEXTS]


@pytest.fixture(scope="module")
def drawn(tiny):
    """A function from the index of a policy to its texts, which are drawn once."""
    return functools.cache(lambda i: texts_drawn(tiny, RULES[i], DRAWS, seed=i))


@pytest.mark.parametrize("rule", range(len(RULES)), ids=lambda i: str(RULES[i]))
def test_concurrent_samples_have_the_exact_joint_distribution(rule, drawn, cells):
    found = p_values(drawn(rule), cells)
    assert min(found) > FALSE_ALARM and pooled(found) > pooled_draws.FALSE_ALARM


@pytest.mark.parametrize("model", [False, True], ids=["alone", "with the draft model"])
@pytest.mark.parametrize("rule", [{}, {"num_assistant_tokens": 3}], ids=str)
def test_concurrent_samples_with_suffix_decoding_are_exact(rule, model, tiny, cells):
    """The drafts come from the text and from the answers before, which are samples of the same few texts."""
    source = SuffixProposer(VOCABULARY, past=PastAnswers(300))
    found = p_values(texts_drawn(tiny, rule, DRAWS, seed=9, suffix=source, model=model), cells)
    assert len(source.past.of(b"").tokens) > 250
    assert min(found) > FALSE_ALARM and pooled(found) > pooled_draws.FALSE_ALARM


@pytest.mark.parametrize("rule", [{}, {"num_assistant_tokens": 3}], ids=str)
def test_concurrent_samples_with_another_tokenizer_are_exact(rule, tiny, cells):
    """The draft has two token ids exchanged for others, a token of two letters, and none for the sixth."""
    found = p_values(texts_drawn(tiny, rule, DRAWS, seed=10, shared=shared_letters()), cells)
    assert min(found) > FALSE_ALARM and pooled(found) > pooled_draws.FALSE_ALARM


def accept_all(patch):
    patch.setattr(
        rejection_sampling,
        "verify_match",
        lambda drafted, p, random: Acceptance(len(drafted), draw(p(len(drafted)), random)),
    )


def accept_the_likeliest(patch):
    match = rejection_sampling.verify_match

    def wrong(drafted, p, random):
        likely = drafted and all(x == np.asarray(p(i)).argmax() for i, x in enumerate(drafted))
        return Acceptance(len(drafted), draw(p(len(drafted)), random)) if likely else match(drafted, p, random)

    patch.setattr(rejection_sampling, "verify_match", wrong)


def second_draw_after_a_mismatch(patch):
    match = rejection_sampling.verify_match

    def wrong(drafted, p, random):
        accepted, token = match(drafted, p, random)
        return Acceptance(accepted, draw(p(accepted), random) if accepted < len(drafted) else token)

    patch.setattr(rejection_sampling, "verify_match", wrong)


@pytest.mark.parametrize(
    ("bug", "draws"),
    [(accept_all, DRAWS), (accept_the_likeliest, DRAWS), (second_draw_after_a_mismatch, 3 * DRAWS)],
)
def test_samples_with_suffix_decoding_show_planted_bugs(bug, draws, tiny, cells, monkeypatch):
    bug(monkeypatch)
    source = SuffixProposer(VOCABULARY, past=PastAnswers(300))
    drawn = texts_drawn(tiny, {"num_assistant_tokens": 3}, draws, suffix=source, model=False)
    assert min(p_values(drawn, cells)) < FALSE_ALARM


def test_pooled_concurrent_samples_are_exact(drawn, cells):
    """The texts of all policies have one distribution."""
    together = {prompt: [text for i in range(len(RULES)) for text in drawn(i)[prompt]] for prompt in TEXTS}
    found = p_values(together, cells)
    assert min(found) > FALSE_ALARM and pooled(found) > pooled_draws.FALSE_ALARM


def test_pooled_samples_detect_slightly_cold_later_tokens(folders, cells):
    """With a power of 0.9: a temperature of 0.9 instead of 1.0, a total variation of 0.04 to 0.11."""
    main = cached_model.load(ModelSpec(folders[0], "CPU", TINY), capacity=64)
    right = [cells[prompt] for prompt in TEXTS]
    wrong = [exact_cells(main, prompt, options, later=0.9) for prompt, options in TEXTS.items()]
    assert 0.03 < np.mean([distance(*pair) for pair in zip(right, wrong, strict=True)]) < 0.08
    assert times_found(right, wrong, DRAWS * len(RULES)) >= 45  # of 50
    assert times_found(right, right, DRAWS * len(RULES), below=0.001) <= 2


@pytest.fixture(scope="module")
def one_at_a_time(folders):
    """Requests of all kinds, each with the output of the single-request decoder."""
    main, draft = (cached_model.load(ModelSpec(folder, "CPU", TINY), capacity=64) for folder in folders)
    decoder, random = Decoder(main, DraftModelProposer(draft, main.vocab_size)), np.random.default_rng(2)
    requests = []
    for seed in range(60):
        rule = RULES[seed % 3]  # what the batch policy drafts depends on the batch
        config = greedy(int(random.integers(2, 20)), do_sample=seed % 2 == 0, **rule)
        requests.append((random.integers(0, 8, random.integers(1, 42)), config, seed))
    return requests, [decoder.generate(*request[:2], seed=request[2]) for request in requests]


def share_that_differs(tiny, one_at_a_time):
    """The share of batched requests that failed, or whose tokens or drafts differ from those they have alone."""
    requests, alone = one_at_a_time
    names = ("tokens", "proposed", "accepted", "gained", "from_draft", "finish_reason", "draft_length")
    pairs = zip(decode_concurrently(tiny, requests), alone, strict=True)
    return np.mean([a is None or any(getattr(a, name) != getattr(b, name) for name in names) for a, b in pairs])


def test_batched_requests_equal_single_requests(tiny, one_at_a_time):
    """Tokens, and what was drafted, accepted and when, greedy and sampled."""
    assert share_that_differs(tiny, one_at_a_time) == 0


def blocks_of_another_request(patch):
    """Bug: a request gets the blocks of another one that has as many."""
    blocks, last = Slot.blocks, {}

    def wrong(self, tokens):
        own = blocks(self, tokens)
        key = self._table._pool, len(own)
        other = last.get(key, own)
        last[key] = own
        return other

    patch.setattr(Slot, "blocks", wrong)


def blocks_in_the_wrong_order(patch):
    blocks = Slot.blocks
    patch.setattr(Slot, "blocks", lambda self, tokens: blocks(self, tokens)[::-1].copy())


def rows_swapped_between_requests(patch):
    logits = BatchModel.logits

    def swapped(self, parts):
        rows = logits(self, parts)
        same = [i for i in range(len(rows)) if len(rows[i]) == len(rows[-1])]
        rows[same[0]], rows[-1] = rows[-1], rows[same[0]]
        return rows

    patch.setattr(BatchModel, "logits", swapped)


def rollback_that_leaves_one_token(patch, room=MAIN_ROOM):
    run_together, ends = PagedModel.run_together, {}

    def off_by_one(self, runs, **options):
        wrong = []
        for run in runs:
            text = id(self), int(run.blocks[0])
            in_block = run.start + len(run.tokens) < len(run.blocks) * self.block_size
            start = run.start + (0 < run.start < ends.get(text, 0) and in_block and self.capacity == room)
            ends[text] = start + len(run.tokens)
            wrong.append(run._replace(start=start))
        return run_together(self, wrong, **options)

    patch.setattr(PagedModel, "run_together", off_by_one)


def positions_continue_across_sequences(patch):
    set_batch = PagedModel._set_batch

    def wrong(self, sizes, width):
        set_batch(self, sizes, width)
        self._batch.offsets = np.arange(len(self._batch.offsets))

    patch.setattr(PagedModel, "_set_batch", wrong)


def stale_draft_cache(patch):
    """Bug: a rejected token stays in the draft's cache. The output is still correct, as any draft is verified."""
    rollback_that_leaves_one_token(patch, DRAFT_ROOM)


def draft_tokens_of_another_request(patch):
    """Bug: a request gets the draft logits of another one. The output is still correct, only slower."""
    read = BatchDecoder._run_draft_model

    def swapped(draft, requests):
        computed = read(draft, requests)
        slots = [request.draft_slot for request in requests if not request.done_drafting]
        for slot, rows in zip(slots, [slot.rows for slot in slots[::-1]], strict=True):
            slot.rows = rows
        return computed

    patch.setattr(BatchDecoder, "_run_draft_model", staticmethod(swapped))


def shared_random_stream(patch):
    one = np.random.default_rng(0)
    patch.setattr(sequence.Sequence, "random", property(lambda self: one, lambda self, own: None), raising=False)


def draft_distribution_of_the_text_before(patch):
    draft, last = sequence.Sequence.draft, []

    def wrong(self, proposal):
        last.append(proposal.q)
        draft(self, proposal._replace(q=last[-2] if last[-2:-1] and last[-2][proposal.token] > 0 else proposal.q))

    patch.setattr(sequence.Sequence, "draft", wrong)


BUGS = {  # and whether the distribution of a few hundred draws shows them
    blocks_of_another_request: True,
    blocks_in_the_wrong_order: True,
    rows_swapped_between_requests: True,
    positions_continue_across_sequences: True,
    rollback_that_leaves_one_token: True,
    draft_distribution_of_the_text_before: False,
    shared_random_stream: False,
    draft_tokens_of_another_request: False,
    stale_draft_cache: False,
}


@pytest.mark.parametrize("bug", [bug for bug, shows in BUGS.items() if shows])
def test_samples_show_planted_bugs(bug, tiny, cells, monkeypatch):
    bug(monkeypatch)

    def shows(draws):
        drawn = texts_drawn(tiny, {"num_assistant_tokens": 2}, draws)
        return drawn is None or min(p_values(drawn, cells)) < FALSE_ALARM

    assert any(map(shows, (50, 150)))  # most show at once


@pytest.mark.parametrize("bug", BUGS)
def test_batched_requests_show_planted_bugs(bug, tiny, one_at_a_time, monkeypatch):
    bug(monkeypatch)
    assert share_that_differs(tiny, one_at_a_time) > 0.1


def test_policy_learns_whether_a_declined_match_was_correct(make, monkeypatch):
    """Unless a draft token before it was rejected."""
    seen, observe = [], AcceptanceEstimate.observe_declined

    def recorded(self, was_correct):
        seen.append(bool(was_correct))
        observe(self, was_correct)

    monkeypatch.setattr(AcceptanceEstimate, "observe_declined", recorded)
    decoder = make("lookup")
    decoder.draft_length = Untimed(LatencyCurve({1: 1.0, 17: 3.0}), LatencyCurve({1: 0.1}), LatencyCurve({1: 0.1}))
    decoder.add_request(PROMPTS[0], greedy(100))
    steps = [output.step for output in finish(decoder)]
    assert seen == declined_matches(decoder.encode(PROMPTS[0]), steps, decoder.main.vocab_size)
    assert {*seen} == {True, False} and any(step.accepted < step.proposed for step in steps)


def test_forward_passes_have_few_sizes():
    """Each shape costs memory for as long as the server runs."""
    sizes = [rounded_up(n) for n in range(1, 1025)]
    assert sizes[:16] == list(range(1, 17))
    assert all(n <= size < min(n * 9 / 8 + 1, n + 16) for n, size in enumerate(sizes, 1))
    assert len(set(sizes[:320])) <= 52


@pytest.mark.parametrize("width", [0, 120])  # the latter needs more than one block of padding
@pytest.mark.parametrize("tokens", [16, 17, 33, 39, 100])
def test_padding_does_not_change_results(models, tokens, width):
    """Each row equals that of its sequence alone, and the caches of other sequences are unchanged."""
    backend = models[1].backend
    text = (np.arange(tokens, dtype=np.int64) * 7919 + 1) % models[1].vocab_size
    last = backend.blocks - 1
    ends = [np.arange(first, first + 4, dtype=np.int32) for first in (0, last - 3)]
    one, other = (SequenceInput(blocks, 0, text, tokens) for blocks in ends)
    alone = backend.run_together([one]).copy()
    backend.run_together([other._replace(tokens=text[::-1])])  # at the table's end, beside the padding
    runs = [run._replace(start=tokens - 3, tokens=text[-3:], last=3) for run in (one, other)]
    both = backend.run_together(runs, width=width)
    assert both.shape[0] == 6 and backend._request.get_tensor("input_ids").shape[0] == max(6, width)
    np.testing.assert_allclose(both[:3], alone[-3:], rtol=1e-3, atol=1e-3)
    assert not np.allclose(both[3:], alone[-3:], atol=0.1)


def test_passes_are_padded_to_one_size_if_changes_are_expensive(tiny):
    """The texts stay the same."""
    sizes, texts = [], []
    for change in (0.0, 100.0):
        rule = BatchDraftLength(LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: 0.2}), LatencyCurve({1: 0.1}), change)
        decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(tiny[1], 64), rule)
        requests = [decoder.add_request(prompt, greedy(40)) for prompt in ([1, 5], [2, 7, 3], [4])]
        sizes.append([])
        while decoder.has_unfinished_requests:
            decoder.step()
            sizes[-1].append(rule.pass_width.last)
        texts.append([request.result.tokens for request in requests])
    assert texts[0] == texts[1]
    changes = [sum(one != other for one, other in itertools.pairwise(of)) for of in sizes]
    assert changes[1] < 5 < changes[0]


def test_forward_pass_is_rounded_up_to_a_known_size(models):
    """The tokens of the sequence, and its rows of logits."""
    backend = models[1].backend
    backend.run_together([SequenceInput(np.arange(2, dtype=np.int32), 0, np.arange(33), 17)])
    shapes = [backend._request.get_tensor(name).shape[0] for name in ("input_ids", "logits_positions")]
    assert shapes == [rounded_up(33), rounded_up(17)] == [36, 18]


def test_capacity_that_is_no_multiple_of_a_block_can_be_used_up():
    """50 tokens in blocks of 32."""
    tokens = (np.arange(50) * 7 + 3) % 4096
    tight, roomy = (cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), capacity=capacity) for capacity in (50, 64))
    assert np.array_equal(tight.logits(tokens, last=20), roomy.logits(tokens, last=20))
    batch = BatchModel(tight)
    assert batch.has_room(50) and batch.pool.needed(50) == batch.pool.blocks == 2


def test_sequence_longer_than_its_blocks_is_rejected(models):
    """OpenVINO would write out of bounds."""
    backend = models[1].backend
    one, other = (np.array([block], np.int32) for block in (0, 1))
    fits = SequenceInput(one, 30, np.arange(2), 1)
    assert len(backend.run_together([fits, fits._replace(blocks=other)])) == 2
    with pytest.raises(ValueError, match="a sequence is longer than its blocks"):
        backend.run_together([fits, SequenceInput(other, 30, np.arange(3), 1)])


# ---- a request that fails -------------------------------------------------------------------------------------------


class Broken(Exception):
    """An error of a class that the engine itself never raises."""


def fail(*arguments):
    raise Broken


def fails_while_drafting(request, patch):
    patch.setattr(request.proposer, "propose", fail)


def fails_while_choosing(request, patch):
    patch.setattr(request, "policy", FixedDraftLength(3))
    patch.setattr(request.policy, "should_draft", fail)


def fails_while_verifying(request, patch):
    patch.setattr(request.sequence, "verify", fail)


def fails_while_decoding_text(request, patch):
    patch.setattr(request.output._text, "_decode", fail)


def fails_while_finishing(request, patch):
    patch.setattr(request.output, "end", fail)


FAILURES = (
    fails_while_drafting,
    fails_while_choosing,
    fails_while_verifying,
    fails_while_decoding_text,
    fails_while_finishing,
)


@pytest.mark.parametrize("crowd", ["alone", "with others", "with a prompt being read"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failing_request_ends_with_its_error_and_others_continue(failure, crowd, make, alone, monkeypatch):
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 32)
    decoder = make()
    bad = decoder.add_request(PROMPTS[1], greedy(8, num_assistant_tokens=3), stream=True)
    others = [decoder.add_request(PROMPTS[i], greedy(20)) for i in (0, 2)] if crowd == "with others" else []
    while bad.sequence.is_prefill:
        decoder.step()
    if crowd == "with a prompt being read":
        others = [decoder.add_request((np.arange(100) * 7 + 3) % 4096, greedy(5))]
    failure(bad, monkeypatch)
    gains = finish(decoder)
    (last,) = [gain for gain in gains if gain.request is bad and not gain.step.tokens]
    assert (
        bad.finished
        and bad.error
        and gains.index(last) == max(i for i, gain in enumerate(gains) if gain.request is bad)
    )
    assert isinstance(bad.error, Broken)
    for request, prompt in zip(others, PROMPTS[0:3:2], strict=False):
        assert request.finished and not request.error
        if crowd == "with others":
            assert request.result.tokens == alone(prompt, 60)[:20]
    assert blocks_are_back(decoder)
    again = decoder.add_request(PROMPTS[1], greedy(8))
    finish(decoder)
    assert again.result.tokens == alone(PROMPTS[1], 60)[:8]


def test_infinite_draft_logits_only_end_the_draft(tiny, tmp_path):
    """A client can cause this: the main model's logits are valid, the draft's are not."""
    folder = save_tiny_llama(tmp_path / "large", seed=1, bias=np.full(8, 50, np.float32))
    draft = cached_model.load(ModelSpec(folder, "CPU", TINY), capacity=DRAFT_ROOM)
    decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(draft, 64), costs())
    config = greedy(30, do_sample=True, num_assistant_tokens=4, repetition_penalty=1e-38)
    for _ in range(2):  # not only the first time
        request = decoder.add_request([1, 5, 2, 7, 3, 0], config, 1)
        with (
            np.errstate(over="ignore"),
            pytest.warns(UserWarning, match="nothing is drafted where"),
        ):
            finish(decoder)
        assert not request.error and len(request.result.tokens) == 30 and not any(request.result.proposed)
    assert not decoder.has_unfinished_requests and blocks_are_back(decoder)


def test_failed_pass_after_a_failed_request_can_be_retried(make, alone, monkeypatch):
    decoder = make()
    good, bad = (decoder.add_request(prompt, greedy(20, num_assistant_tokens=2)) for prompt in PROMPTS[:2])
    while good.sequence.is_prefill or bad.sequence.is_prefill:
        decoder.step()
    fails_while_drafting(bad, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.main, "logits", fail)
        with pytest.raises(Broken):
            decoder.step()
    before = len(bad.result.tokens)
    finish(decoder)
    assert bad.error and len(bad.result.tokens) == before
    assert good.result.tokens == alone(PROMPTS[0], 60)[:20] and blocks_are_back(decoder)


def test_seeded_text_is_unchanged_when_a_step_is_retried(make, monkeypatch):
    texts = []
    for fails in (False, True):
        decoder = make()
        request = decoder.add_request(PROMPTS[0], greedy(40, do_sample=True, num_assistant_tokens=3), seed=5)
        for _ in range(6):
            decoder.step()
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(decoder.main, "logits", fail)
                for _ in range(3):
                    with pytest.raises(Broken):
                        decoder.step()
        finish(decoder)
        texts.append(request.result.tokens)
    assert texts[0] == texts[1]


def test_waiting_prompts_are_compared_only_as_far_as_scheduled(monkeypatch):
    """Comparing all with all in each iteration would take a second with hundreds of them."""
    compared, can_wait_for = [], ScheduledTokens.can_wait_for
    monkeypatch.setattr(
        ScheduledTokens, "can_wait_for", lambda one, other: compared.append(one) or can_wait_for(one, other)
    )
    decoder = BatchDecoder(BatchModel(cached_model.load(ModelSpec(DRAFT), capacity=6000)), None, costs())
    for i in range(40):
        decoder.add_request(np.arange(i, i + 100), greedy(4))
    decoder.step()
    assert 0 < len(compared) < 40
    finish(decoder)


@pytest.mark.parametrize("named", ["seed", "rng_seed"])
def test_same_seed_gives_same_text_whatever_the_batch_policy_does(named, tiny):
    """Without a policy in the config, and with costs that change between batches."""

    def text(draft, others):
        rule = BatchDraftLength(LatencyCurve({1: 1.0, 64: 3.0}), LatencyCurve({1: draft}), LatencyCurve({1: draft}))
        decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(tiny[1], 64), rule)
        config = greedy(40, do_sample=True)
        if named == "rng_seed":
            config.rng_seed = 7
        request = decoder.add_request([1, 5, 2, 7, 3, 0], config, 7 if named == "seed" else None)
        for i in range(others):
            decoder.add_request([2, 3, 1, 7], greedy(40, do_sample=True), i)
        finish(decoder)
        return request.result.tokens

    assert text(0.0, 0) == text(50.0, 0) == text(0.5, 8)


def test_batch_policy_applies_without_a_seed(tiny):
    decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(tiny[1], 64), costs())
    config = greedy(40, do_sample=True)
    requests = [decoder.add_request([1, 5], config), decoder.add_request([1, 5], greedy(40), 7)]
    requests += [decoder.add_request([1, 5], config, seed) for seed in (7, 0)]
    assert [request.follows_batch for request in requests] == [True, True, False, False]
    finish(decoder)


@pytest.mark.parametrize("tokens", [23, 24, 25, 48, 49])
def test_prompt_is_read_in_as_few_passes_as_its_chunks_need(tokens, tiny, monkeypatch):
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 24)
    decoder = BatchDecoder(BatchModel(tiny[0], 64), None, costs())
    request = decoder.add_request(np.arange(tokens) % 8, greedy(1))
    finish(decoder, most=-(-tokens // 24))
    assert len(request.result.tokens) == 1


def test_short_prompts_do_not_wait_for_a_long_one(tiny, monkeypatch):
    """They get up to half of each pass; prompts of equal length are computed one after the other."""
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 24)
    decoder = BatchDecoder(BatchModel(tiny[0], 64), None, costs())
    prompts = [np.arange(n) % 7 + i % 2 for i, n in enumerate((55, 54, 10, 5))]
    for prompt in prompts:
        decoder.add_request(prompt, greedy(1))
    passes, logits = [], decoder.main.logits
    decoder.main.logits = lambda parts: passes.append([part.missing for part in parts]) or logits(parts)
    finish(decoder)
    assert passes == [[10, 2, 12], [3, 21], [22, 2], [24], [24], [4]]


@pytest.mark.parametrize(
    ("seconds", "piece"),
    [({1: 1.0, 2: 100.0}, 8), ({1: 1.0, 101: 10.0}, 22), ({1: 1.0, 501: 2.0}, 32)],
    ids=["minimum", "three times a plain pass", "maximum"],
)
def test_prefill_chunk_size_limits_the_delay_of_running_requests(seconds, piece, tiny, monkeypatch):
    monkeypatch.setattr(batch_decoder, "PREFILL_CHUNK", 32)
    rule = BatchDraftLength(LatencyCurve(seconds), LatencyCurve({1: 0.2}), LatencyCurve({1: 0.1}))
    monkeypatch.setattr(rule.main, "update", lambda *_: None)  # not from this machine's clock
    decoder = BatchDecoder(BatchModel(tiny[0], 64), None, rule)
    decoder.add_request([1, 5], greedy(30))
    decoder.step()
    prompt = np.arange(50) % 8
    long = decoder.add_request(prompt, greedy(2))
    decoder.step()
    assert long.slot.common_prefix(prompt) == piece
    finish(decoder)


class RecordingPolicy(BatchDraftLength):
    """Records the arguments of its calls in an iteration."""

    def begin(self, estimates, texts):
        self.begun, self.chosen, self.read = (len(estimates), texts), [], []
        super().begin(estimates, texts)

    def choose(self, estimates, tokens, anyway, forced):
        self.chosen.append((len(estimates), tokens, anyway))
        return super().choose(estimates, tokens, anyway, forced)

    def update_draft(self, tokens, seconds, search_seconds):
        self.read.append(tokens)
        super().update_draft(tokens, seconds, search_seconds)

    def update_main(self, verified, prompts, gained, seconds):
        self.verified = verified, prompts, gained
        super().update_main(verified, prompts, gained, seconds)


def test_batch_policy_receives_the_contents_of_an_iteration(tiny):
    """One request with its own policy, one under the batch policy, one that cannot draft any more, and a prompt."""
    dear = LatencyCurve({1: 1.0, 64: 64.0})
    rule = RecordingPolicy(LatencyCurve({1: 1.0, 64: 640.0}), dear, dear)  # drafting never helps
    decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(tiny[1], 64), rule)
    requests = [decoder.add_request([1, 5, 2], greedy(n, **own)) for n, own in ((9, RULES[1]), (9, {}), (2, {}))]
    decoder.step()
    decoder.add_request([2, 3, 1, 7, 4], greedy(2))
    gained = sum(len(gain.step.tokens) for gain in decoder.step() if gain.request in requests)
    assert rule.begun == (1, 3)
    assert rule.chosen == [(1, 5 + 3 + i, 1) for i in range(7)] + [(1, 5 + 3 + 7, 0)]
    assert rule.read == [4] + [1] * 6
    assert rule.verified == (3 + 7, 5, gained)
    finish(decoder)


def test_first_error_of_a_request_is_reported(tiny, monkeypatch):
    """Finishing the request fails, too."""
    decoder = BatchDecoder(BatchModel(tiny[0], 64), None, costs())
    request = decoder.add_request([1, 5], greedy(3))
    monkeypatch.setattr(request.sequence, "verify", fail)
    monkeypatch.setattr(request.output, "end", lambda: 1 / 0)
    finish(decoder)
    assert isinstance(request.error, Broken) and request.result.finish_reason == "cancelled"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The tiny draft, without the last two of its tokens."""
    llama = tiny_llama(1, noise=0.2)
    llama = dataclasses.replace(
        llama,
        embedding=Matrix(*(part[:6] for part in llama.embedding)),
        head=Matrix(*(part[:6] for part in llama.head)),
    )
    file = tmp_path_factory.mktemp("narrow") / "openvino_model.xml"
    openvino.save_model(llama_ir.build(llama), file, compress_to_fp16=False)
    return cached_model.load(ModelSpec(file.parent, "CPU", TINY), capacity=DRAFT_ROOM)


def test_draft_is_not_used_after_tokens_outside_its_vocabulary(narrow, tiny):
    """Its embedding table ends before these ids: a read would be out of bounds."""
    assert narrow.vocab_size == 6
    decoder = BatchDecoder(BatchModel(tiny[0], 64), BatchModel(narrow, 64), costs())
    prompts = {True: [1, 5, 2], False: [1, 6, 2]}
    requests = {
        known: decoder.add_request(prompt, greedy(4, num_assistant_tokens=3)) for known, prompt in prompts.items()
    }
    finish(decoder)
    assert [bool(sum(requests[known].result.proposed)) for known in (True, False)] == [True, False]
    one = DraftModelProposer(narrow, tiny[0].vocab_size)
    proposals = [one.propose(np.array(prompts[known]), lambda logits, *_: softmax(logits), np.random.default_rng(0))
                 for known in (True, False)]  # fmt: skip
    assert proposals[0].q[6:].tolist() == [0, 0] and proposals[1] is None


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
