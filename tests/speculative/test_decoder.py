"""The single-request engine: its greedy output is the main model's, stop conditions are exact, and caches have no
effect on the output.

Everything runs in exact arithmetic (EXECUTION_MODE_HINT=ACCURACY), where no near-tie depends on the size of a pass, and
nearly everything on small models: the embedded draft, with a noisy copy of it as its draft.
"""

import itertools
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import openvino_genai
import pytest
from openvino_genai import ChatHistory, GenerationConfig, StreamingStatus

from speculative import decoder
from speculative.bench import genai
from speculative.decoder import Decoder
from speculative.drafting import cost_model
from speculative.drafting.combined import CombinedDraftLength, CombinedProposer
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import AdaptiveDraftLength, ConfidenceDraftLength, Costs, FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.drafting.suffix import SuffixProposer
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from tests.support.changed_tokenizer import cleaning_up, only
from tests.support.declined import declined_matches
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import CORES, DRAFT, MAIN, ROOT

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
CODE = ROOT / "scripts/prompts/embedded_code.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in CODE.read_text(encoding="utf-8").splitlines()]
COSTS = Costs(draft=0.1, main={1: 1.0, 5: 1.2, 17: 2.5})
RULES = [
    FixedDraftLength(1),
    FixedDraftLength(11),
    ConfidenceDraftLength(0.5),
    AdaptiveDraftLength(COSTS),
    FixedDraftLength(3, 9),
    FixedDraftLength(4),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The embedded draft, and the same with noise in the weights: a fifteenth of what the embedded pair costs."""
    return DRAFT, save_noisy_draft(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def models(folders):
    return tuple(cached_model.load(ModelSpec(folder, "CPU", EXACT)) for folder in folders)


@pytest.fixture(scope="module")
def tokenizer():
    return openvino_genai.Tokenizer(str(MAIN))


@pytest.fixture
def make(models, tokenizer):
    return maker_of(*models, tokenizer)


def maker_of(main, draft, tokenizer):
    def make(rule=None, source="model"):
        draft_source = {
            "model": lambda: DraftModelProposer(draft, main.vocab_size),
            "lookup": lambda: SuffixProposer(main.vocab_size),
            "two sources": lambda: CombinedProposer(
                SuffixProposer(main.vocab_size), DraftModelProposer(draft, main.vocab_size)
            ),
            None: lambda: None,
        }[source]()
        return Decoder(main, draft_source, rule, tokenizer, frozenset({0}))

    return make


@pytest.fixture(scope="module")
def plain(tokenizer):
    return plain_of(DRAFT, tokenizer)


def plain_of(folder, tokenizer):
    """A function from a prompt to this model's own output in GenAI."""
    pipe = genai.load(ModelSpec(folder, "CPU", EXACT))

    def plain(prompt, tokens):
        return genai.generate(pipe, genai.encode(tokenizer, prompt), tokens).tokens

    return plain


@pytest.fixture(scope="module")
def make_embedded(tokenizer):
    return maker_of(*(cached_model.load(ModelSpec(folder, "CPU", EXACT)) for folder in (MAIN, DRAFT)), tokenizer)


@pytest.fixture(scope="module")
def plain_embedded(tokenizer):
    return plain_of(MAIN, tokenizer)


def greedy(tokens, **options):
    return GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **options)


def assert_greedy_tokens_are_those_of(plain, decoders, prompts, tokens=48):
    """The engine with each of `decoders` equals GenAI without a draft. The last one has a draft with some
    correct and some wrong tokens."""
    accepted = 0
    for prompt in prompts:
        expected = plain(prompt, tokens)
        results = [one.generate(prompt, greedy(tokens)) for one in decoders]
        assert all(result.tokens == expected for result in results)
        accepted += results[-1].acceptance_rate
    assert 0.3 < accepted / len(prompts) < 0.9


def every_kind(make):
    """A decoder without a draft, with prompt lookup, with both at once, and with each draft-length policy."""
    both = [make(rule, source="two sources") for rule in (FixedDraftLength(5), CombinedDraftLength(COSTS))]
    return [make(source=None), make(source="lookup"), *both, *(make(rule) for rule in RULES)]


def test_greedy_tokens_equal_main_model_alone(make, plain):
    assert_greedy_tokens_are_those_of(plain, every_kind(make), PROMPTS[::4])


@pytest.mark.long
def test_greedy_tokens_of_all_prompts_equal_main_model_alone(make, plain):
    assert len(PROMPTS) >= 20
    assert_greedy_tokens_are_those_of(plain, every_kind(make), PROMPTS)


def test_greedy_tokens_of_embedded_pair_equal_main_model_alone(make_embedded, plain_embedded):
    assert_greedy_tokens_are_those_of(plain_embedded, [make_embedded(RULES[-1])], PROMPTS[:2], tokens=32)


@pytest.mark.long
def test_greedy_tokens_of_embedded_pair_are_exact_for_every_policy(make_embedded, plain_embedded):
    assert_greedy_tokens_are_those_of(plain_embedded, every_kind(make_embedded), PROMPTS[::5])
    long = make_embedded(RULES[-1]).generate(PROMPTS[0], greedy(500))
    assert long.tokens == plain_embedded(PROMPTS[0], 500)


def test_long_greedy_text_equals_main_model_alone(make, plain):
    expected = plain(PROMPTS[0], 500)
    for rule in RULES[1:]:
        assert make(rule).generate(PROMPTS[0], greedy(500)).tokens == expected


def test_greedy_tokens_equal_those_of_genai_with_the_draft(make, tokenizer, folders):
    pipe = genai.load(*(ModelSpec(folder, "CPU", EXACT) for folder in folders))
    for k, prompt in itertools.product((2, 5), PROMPTS[:3]):
        theirs = genai.generate(pipe, genai.encode(tokenizer, prompt), 80, k)
        ours = make().generate(prompt, greedy(80, num_assistant_tokens=k))
        assert ours.tokens == theirs.tokens


def test_draft_that_is_the_main_model_is_always_accepted(models, tokenizer):
    one = Decoder(
        models[0],
        DraftModelProposer(cached_model.load(ModelSpec(DRAFT, "CPU", EXACT)), models[0].vocab_size),
        FixedDraftLength(3),
    )
    result = one.generate(list(range(100, 120)), greedy(17))
    assert result.from_draft == [False] + [True, True, True, False] * 4
    assert result.acceptance_rate == 1 and result.block_efficiency == 4 and result.position_acceptance == [1, 1, 1]


def test_tree_of_the_config_is_a_chain_with_leaves(make):
    steps = [*make().stream(PROMPTS[0], greedy(40, num_assistant_tokens=8, tree_depth=2))]
    assert {(step.proposed, step.leaves) for step in steps[1:-2]} == {(2, 6)}
    assert any(step.ends_in_leaf for step in steps) and not any(step.leaves > 6 for step in steps)
    chain, tree = (make().generate(PROMPTS[0], greedy(40, num_assistant_tokens=8, tree_depth=d)) for d in (0, 2))
    assert chain.tokens == tree.tokens
    assert tree.accepted == [step.accepted - step.ends_in_leaf for step in steps[1:]]  # leaves are no draft tokens


def recorded_sizes(model, monkeypatch):
    """The sizes in tokens of the model's passes from now on."""
    sizes, run = [], model.backend.run

    def recorded(start, tokens, *more):
        sizes.append(len(tokens))
        return run(start, tokens, *more)

    monkeypatch.setattr(model.backend, "run", recorded)
    monkeypatch.setattr(model, "pass_width", None)  # that of other costs
    return sizes


def test_passes_keep_their_size_after_an_accepted_leaf(models, make, monkeypatch):
    """Leaves fill the planned size, less the accepted leaf, which is computed again."""
    sizes = recorded_sizes(models[0], monkeypatch)
    costs = Costs(draft=0.5, main={1: 1.0, 6: 1.01, 17: 9.0}, main_change=0.1)
    decoder = make(AdaptiveDraftLength(costs))
    steps = [*decoder.stream(PROMPTS[0], greedy(300, do_sample=True, temperature=0.7), seed=1)]
    accepted = [i for i, step in enumerate(steps[:-1]) if step.ends_in_leaf]
    assert len(accepted) > 2 and set(sizes[accepted[0] :]) == {6}, (accepted, sizes)


def test_token_after_a_leaf_says_nothing_about_matches(models, make, monkeypatch):
    """They were found for what follows the rejected token."""
    seen, observe = [], CombinedDraftLength.observe

    def recorded(self, tokens):
        seen.append(len(tokens))
        observe(self, tokens)

    monkeypatch.setattr(CombinedDraftLength, "observe", recorded)
    monkeypatch.setattr(models[0], "pass_width", None)
    costs = Costs(draft=0.75, main={1: 1.0, 6: 1.01, 17: 9.0}, main_change=0.1)
    decoder = make(CombinedDraftLength(costs), source="two sources")
    steps = [*decoder.stream(PROMPTS[0], greedy(300, do_sample=True, temperature=0.7), seed=1)]
    assert any(step.ends_in_leaf for step in steps)
    assert seen == [len(step.tokens) - step.ends_in_leaf for step in steps]


def test_policy_learns_whether_a_declined_match_was_correct(models, make, monkeypatch):
    """Unless a draft token before it was rejected."""
    seen, observe = [], LookupDraftLength.observe_declined

    def recorded(self, was_correct):
        seen.append(was_correct)
        observe(self, was_correct)

    monkeypatch.setattr(LookupDraftLength, "observe_declined", recorded)
    monkeypatch.setattr(models[0], "pass_width", None)
    decoder = make(LookupDraftLength(Costs(draft=0.1, main={1: 1.0, 17: 3.0})), source="lookup")
    steps = [*decoder.stream(PROMPTS[0], greedy(100), seed=1)]
    assert seen == declined_matches(decoder.encode(PROMPTS[0]), steps, models[0].vocab_size)
    assert {*seen} == {True, False} and sum(step.accepted < step.proposed for step in steps) > 5


def test_passes_with_prompt_logprobs_do_not_depend_on_earlier_calls(models, make, monkeypatch):
    sizes = recorded_sizes(models[0], monkeypatch)
    costs = Costs(draft=0.1, main={1: 1.6, 3: 1.4, 4: 1.4, 6: 1.45, 17: 3.0}, main_change=0.6)
    decoder = make(AdaptiveDraftLength(costs))
    calls = []
    for _ in range(2):
        sizes.clear()
        decoder.generate(np.arange(1, 7), greedy(30, do_sample=True), seed=1, prompt_logprobs=1)
        calls.append([*sizes])
    assert calls[0] == calls[1] and calls[0][0] == 5


def test_passes_without_a_possible_draft_are_not_padded(models, tokenizer, monkeypatch):
    """Beyond the draft's context."""
    draft = cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), capacity=24)
    sizes = recorded_sizes(models[0], monkeypatch)
    policy = AdaptiveDraftLength(Costs(draft=0.05, main={1: 1.0, 8: 1.05, 17: 1.1}, main_change=2.0))
    decoder = Decoder(models[0], DraftModelProposer(draft, models[0].vocab_size), policy, tokenizer)
    steps = [*decoder.stream(np.arange(1, 17), greedy(40))]
    assert max(sizes[1:5]) > 4 and sum(len(step.tokens) for step in steps) == 40
    assert {*sizes[-10:]} == {1}, sizes


def test_tree_requires_paged_attention_and_no_grammar(models, make, tokenizer):
    stateful = Decoder(cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), stateful=True), tokenizer=tokenizer)
    structure = {"structured_output_config": openvino_genai.StructuredOutputConfig(regex="a+")}
    for one, more in ((stateful, {}), (make(), structure)):
        with pytest.raises(ValueError, match="tree_depth=2 needs a main model on a CPU"):
            one.generate(PROMPTS[0], greedy(5, num_assistant_tokens=4, tree_depth=2, **more))
    without = Decoder(stateful.main, DraftModelProposer(models[1], models[1].vocab_size), FixedDraftLength(2, 4))
    assert not any(step.leaves for step in without.stream(np.arange(5), greedy(20)))


def test_leaves_fit_in_the_remaining_context(models, tokenizer):
    """Their cache entries follow those of the draft tokens."""
    main, draft = (cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), capacity=24) for _ in range(2))
    decoder = Decoder(main, DraftModelProposer(draft, main.vocab_size), FixedDraftLength(2, 8))
    config = GenerationConfig(max_new_tokens=100, ignore_eos=True)
    steps = [*decoder.stream(np.arange(4), config)]
    tokens = [token for step in steps for token in step.tokens]
    assert len(tokens) == 20 and steps[1].leaves == 8 and steps[-1].leaves < 8
    assert tokens == Decoder(main).generate(np.arange(4), config).tokens


def test_config_uses_genai_names_for_draft_settings(make):
    one = make(FixedDraftLength(2))
    assert set(one.generate(PROMPTS[0], greedy(30, num_assistant_tokens=5)).proposed[:-1]) == {5}
    assert set(one.generate(PROMPTS[0], greedy(30)).proposed[:-1]) == {2}
    assert len(set(one.generate(PROMPTS[0], greedy(60, assistant_confidence_threshold=0.6)).proposed)) > 2


@pytest.mark.parametrize("wanted", [1, 2, 5, 6, 7])
def test_never_more_tokens_than_requested(make, wanted):
    result = make().generate(PROMPTS[1], greedy(wanted, num_assistant_tokens=5))
    assert len(result.tokens) == len(result.from_draft) == wanted and result.finish_reason == "length"
    assert sum(result.gained) == wanted - 1 and all(k < wanted for k in result.proposed)


def test_max_length_counts_the_prompt(make):
    config = GenerationConfig(max_length=40, ignore_eos=True)
    one = make()
    assert len(one.encode(PROMPTS[0])) + len(one.generate(PROMPTS[0], config).tokens) == 40


def test_text_ends_at_eos_even_if_the_draft_proposed_it(make, plain):
    config = GenerationConfig(max_new_tokens=120)
    ends = []
    for prompt in PROMPTS:
        expected = plain(prompt, 120)
        if 0 in expected:
            expected = expected[: expected.index(0) + 1]
        result = make().generate(prompt, config)
        assert result.tokens == expected
        assert result.finish_reason == ("stop" if expected[-1] == 0 else "length")
        ends.append(expected[-1] == 0 and result.from_draft[-1])
        if any(ends) and not all(ends):
            return
    pytest.fail("no text ended, or none with a token of the draft: this proves nothing")


def test_stop_token_ids_end_the_text_and_min_new_tokens_defers_them(make):
    tokens = make().generate(PROMPTS[0], greedy(40)).tokens
    stop = tokens[9]
    first = tokens.index(stop)
    result = make().generate(PROMPTS[0], GenerationConfig(max_new_tokens=40, stop_token_ids={stop}))
    assert result.tokens == tokens[: first + 1] and result.finish_reason == "stop"
    later = make().generate(
        PROMPTS[0], GenerationConfig(max_new_tokens=40, stop_token_ids={stop}, min_new_tokens=first + 5)
    )
    assert stop not in later.tokens[: first + 5] and len(later.tokens) > first + 5


def test_stop_strings_end_the_text_exactly(make):
    whole = make().generate(PROMPTS[0], greedy(60))
    for stop in (whole.text[20:24], whole.text[33:40], whole.text[50]):
        pieces = []
        config = greedy(60, stop_strings={stop, "never said"})
        result = make().generate(PROMPTS[0], config, pieces.append)
        before = whole.text[: whole.text.index(stop)]
        assert result.text == "".join(pieces) == before and result.finish_reason == "stop"
        assert whole.tokens[: len(result.tokens)] == result.tokens and len(result.tokens) < len(whole.tokens)
        config.include_stop_str_in_output = True
        assert make().generate(PROMPTS[0], config).text == before + stop


def test_streamers_receive_all_text_and_can_stop(make):
    pieces = []
    whole = make().generate(PROMPTS[2], greedy(50), pieces.append)
    assert "".join(pieces) == whole.text and len(pieces) > 5

    class Collector(openvino_genai.StreamerBase):
        def __init__(self, limit):
            super().__init__()
            self.tokens, self.limit, self.ended = [], limit, False

        def write(self, tokens):
            self.tokens += tokens
            return StreamingStatus.STOP if len(self.tokens) >= self.limit else StreamingStatus.RUNNING

        def end(self):
            self.ended = True

    collector = Collector(limit=20)
    result = make().generate(PROMPTS[2], greedy(50), collector)
    assert collector.ended and collector.tokens == result.tokens == whole.tokens[: len(result.tokens)]
    assert 20 <= len(result.tokens) < 30 and result.finish_reason == "cancelled"


@pytest.mark.parametrize("answer", [True, StreamingStatus.STOP, StreamingStatus.CANCEL])
def test_every_stop_value_of_a_streamer_ends_the_text(answer, make):
    pieces = []
    result = make().generate(PROMPTS[2], greedy(50), lambda text: pieces.append(text) or answer)
    assert len(pieces) == 1 and result.finish_reason == "cancelled" and len(result.tokens) < 50


def test_streamed_pieces_join_to_text_with_tokenizer_clean_up(models, tokenizer):
    one, pieces = Decoder(models[0], tokenizer=cleaning_up(tokenizer)), []
    config = greedy(40, do_sample=True, temperature=1.5)
    result = one.generate(PROMPTS[0], config, pieces.append, seed=1, logit_bias=only(tokenizer, " ", "."))
    as_written = tokenizer.decode(result.tokens)
    assert "".join(pieces) == result.text == as_written.replace(" .", ".") != as_written


def test_failing_streamer_leaves_the_decoder_free(make):
    one = make()
    with pytest.raises(ZeroDivisionError):
        one.generate(PROMPTS[2], greedy(20), lambda text: 1 / 0)
    assert len(one.generate(PROMPTS[2], greedy(20)).tokens) == 20


def test_chat_turn_computes_only_new_tokens(make, models):
    one = make()
    history = [{"role": "user", "content": "Write a function that adds two numbers."}]
    first = one.generate(history, GenerationConfig(max_new_tokens=40))
    history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Now subtract them."}]
    again = one.encode(history)
    held = models[0].common_prefix(again)
    assert held >= len(one.encode(history[:1]))  # the first turn at least
    second = one.generate(history, greedy(40))
    one.reset()
    assert one.generate(history, greedy(40)).tokens == second.tokens  # the cache makes no difference


def test_same_seed_gives_the_same_text(make):
    one = make(AdaptiveDraftLength(COSTS))
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True, do_sample=True, temperature=1.2)
    first = one.generate(PROMPTS[0], config, seed=7)
    one.generate(PROMPTS[1], config)
    again = one.generate(PROMPTS[0], config, seed=7)
    assert again.tokens == first.tokens and again.proposed == first.proposed
    assert one.generate(PROMPTS[0], config, seed=8).tokens != first.tokens
    config.rng_seed = 7  # GenAI's name for it
    assert one.generate(PROMPTS[0], config).tokens == first.tokens


def test_seeded_text_with_prompt_lookup_equals_main_model_alone(make):
    """Draft tokens that are not random need no random number of their own."""
    config = GenerationConfig(max_new_tokens=60, do_sample=True, temperature=0.7, top_k=20, ignore_eos=True)
    config.num_assistant_tokens, accepted = 5, 0
    for prompt in PROMPTS[:4]:
        alone, looked_up = (make(source=source).generate(prompt, config, seed=3) for source in (None, "lookup"))
        assert looked_up.tokens == alone.tokens
        accepted += sum(looked_up.accepted)
    assert accepted > 20


def test_seeded_text_is_unaffected_by_other_draft_lengths(models, tokenizer):
    """At default precision, where the padding of the adaptive length changes how logits are rounded."""
    main, draft = (cached_model.load(ModelSpec(folder), capacity=512) for folder in (MAIN, DRAFT))
    costs = Costs(0.0003, {1: 0.00145, 4: 0.0016, 17: 0.0026}, main_change=0.0016)
    one = Decoder(main, DraftModelProposer(draft, main.vocab_size), AdaptiveDraftLength(costs), tokenizer)
    sampled = GenerationConfig(max_new_tokens=200, do_sample=True, ignore_eos=True, assistant_confidence_threshold=0.4)
    for seed in range(4):
        before = one.generate(PROMPTS[0], sampled, seed=seed).tokens
        one.generate(PROMPTS[0], greedy(20))
        assert one.generate(PROMPTS[0], sampled, seed=seed).tokens == before


def test_rejected_call_does_not_disturb_the_running_stream(make):
    one = make(FixedDraftLength(3))
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True, do_sample=True, temperature=1.2)
    alone = one.generate(PROMPTS[0], config, seed=7).tokens
    steps = one.stream(PROMPTS[0], config, seed=7)
    tokens = [*next(steps).tokens, *next(steps).tokens]
    with pytest.raises(RuntimeError, match="busy"):
        one.generate(PROMPTS[1], config, seed=99)
    with pytest.raises(RuntimeError, match="busy"):
        one.reset(seed=99)
    for step in steps:
        tokens += step.tokens
    assert tokens == alone


def test_stopped_streamer_receives_no_more_and_needs_a_tokenizer(make, models):
    pieces = []
    config = greedy(60, stop_strings={"   Z"})  # holds blanks back
    result = make().generate("def read_file(path):", config, lambda text: bool(pieces.append(text)) or len(pieces) == 1)
    assert result.finish_reason == "cancelled" and len(pieces) == 1
    with pytest.raises(ValueError, match="no tokenizer"):
        Decoder(models[0]).generate(np.array([1, 2, 3]), greedy(3), print)


class WithFirstToken:
    """A tokenizer that puts token 1, `<s>`, first, as Llama's; its chat template writes `<s>` itself."""

    chat_template = "<s>..."

    def apply_chat_template(self, history, add_generation_prompt):
        return "<s>..."

    def encode(self, text, add_special_tokens=True):
        ids = [1] * add_special_tokens + [1] * text.startswith("<s>") + [5, 6] * len(text.split())
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.array([ids])))


@pytest.mark.parametrize(
    ("prompt", "config"),
    [("hi", None), ([{"role": "user", "content": "hi"}], None), ("hi", GenerationConfig(apply_chat_template=False))],
    ids=["text", "chat", "text without the template"],
)
def test_prompt_has_the_bos_token_once(prompt, config):
    assert decoder.encode(prompt, WithFirstToken(), config).tolist() == [1, 5, 6]


@pytest.mark.parametrize(
    "chat", [[{"role": "user", "content": "hi"}], ChatHistory([{"role": "user", "content": "hi"}])]
)
def test_chat_requires_a_tokenizer(models, chat):
    with pytest.raises(ValueError, match="this decoder has no tokenizer"):
        Decoder(models[0]).encode(chat)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(max_ngram_size=0), "max_ngram_size is 0"),
        (dict(max_ngram_size=2.5), "max_ngram_size is 2.5"),
    ],
)
def test_invalid_draft_sources_are_rejected(options, word):
    with pytest.raises(ValueError, match=word):
        decoder.load(MAIN, **options)


def test_decoder_handles_one_request_at_a_time(make):
    one = make()
    steps = one.stream(PROMPTS[0], greedy(30))
    next(steps)
    errors = []

    def other():
        try:
            one.generate(PROMPTS[1], greedy(5))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "busy" in errors[0]
    steps.close()
    assert len(one.generate(PROMPTS[1], greedy(5)).tokens) == 5


@pytest.mark.parametrize(
    ("prompt", "config", "word"),
    [
        ([], GenerationConfig(max_new_tokens=5), "no tokens"),
        (list(range(1, 1100)), GenerationConfig(max_new_tokens=5), "1099 tokens"),
        ([5], GenerationConfig(max_new_tokens=5, num_beams=4), "num_beams"),
        ([5], GenerationConfig(max_new_tokens=5, do_sample=True, temperature=-1.0), "temperature"),
        ([5000], GenerationConfig(max_new_tokens=5), "5000"),
        ([5, 6, 7], GenerationConfig(max_length=3), "max_length is 3"),
        (["a", "b"], GenerationConfig(max_new_tokens=5), "flat list of token ids"),
        ([1.5, 2.0], GenerationConfig(max_new_tokens=5), "flat list of token ids"),
    ],
)
def test_invalid_request_gives_one_sentence_error(make, prompt, config, word):
    with pytest.raises(ValueError, match=word) as error:
        make().generate(prompt, config)
    assert "\n" not in str(error.value)


def test_text_requires_a_tokenizer(models):
    one = Decoder(models[0])
    with pytest.raises(ValueError, match="tokenizer"):
        one.generate("text", greedy(5))
    with pytest.raises(ValueError, match="tokenizer"):
        one.generate([5], greedy(5, stop_strings={"x"}))


def test_context_length_ends_the_text(make):
    prompt = (np.arange(1000) * 7 + 3) % 4096
    assert len(make().generate(prompt, greedy(100)).tokens) == 1024 - 1000


def test_draft_with_shorter_context_stops_at_its_end(models, tokenizer, plain):
    short = cached_model.load(ModelSpec(DRAFT, "CPU", EXACT), capacity=60)
    one = Decoder(models[0], DraftModelProposer(short, models[0].vocab_size), FixedDraftLength(4), tokenizer)
    result = one.generate(PROMPTS[0], greedy(100))
    assert result.tokens == plain(PROMPTS[0], 100)
    assert result.proposed[0] == 4 and result.proposed[-2] == 0


def test_text_ends_at_the_capacity_given_to_load():
    one = decoder.load(DRAFT, capacity=64)
    assert one.main.capacity == 64 and len(one.generate(np.arange(60), greedy(100)).tokens) == 4


def test_load_measures_costs_once_and_caches_them(folders, tmp_path):
    main, draft = ModelSpec(folders[0], "CPU", {"CACHE_DIR": str(tmp_path)}), folders[1]
    decoder.load(main, draft)
    kept = list(tmp_path.glob("costs-*.json"))
    assert len(kept) == 1
    other = json.loads(kept[0].read_text(encoding="utf-8"))
    other["main"]["1"] *= 1000  # measured on a busy machine: it is kept, or a seed would not reproduce its text
    kept[0].write_text(json.dumps(other), encoding="utf-8")
    assert decoder.load(main, draft).draft_length.costs.main[1] == other["main"]["1"]
    kept[0].write_text("{", encoding="utf-8")  # cut off
    decoder.load(main, draft)
    assert 0 < json.loads(kept[0].read_text(encoding="utf-8"))["main"]["1"] < other["main"]["1"]
    assert list(tmp_path.glob("costs-*")) == kept


def test_costs_of_a_small_capacity_are_cached_apart(tmp_path):
    """It has no room for long passes, which would seem to cost no more than short ones, whatever the capacity."""
    main = ModelSpec(DRAFT, "CPU", {"CACHE_DIR": str(tmp_path)})
    small, full, again = (
        decoder.load(main, max_ngram_size=4, capacity=capacity).draft_length.costs for capacity in (8, None, 8)
    )
    assert max(small.main) < 8 and set(full.main) == set(cost_model.MEASURED) and again == small


def test_costs_measured_under_load_are_measured_again(monkeypatch):
    """If they were cached, they would cause wrong draft lengths for as long as the models stay the same."""
    quiet = {n: 0.003 + 0.0003 * n for n in cost_model.MEASURED}
    busy = [{**quiet, 1: 0.027, 5: 0.030}, {**quiet, 2: 0.023, 17: 0.035}, {**quiet, 3: 0.050}]
    measured = iter([*busy, {n: seconds * 2 for n, seconds in quiet.items()}])
    times = []

    def clock(main, draft, counts):
        times.append(next(measured))
        changed = {n: seconds + 0.002 for n, seconds in times[-1].items()}
        return cost_model.Seconds(times[-1], {1: 0.001 / len(times)}, {1: 0.0005}, changed)

    monkeypatch.setattr(cost_model, "_measure_seconds", clock)
    costs = cost_model.measure(None, None)
    assert len(times) == 2 and costs.main == quiet and costs.draft == 0.0005
    assert costs.main_change == pytest.approx(0.002)


@pytest.mark.skipif(len(CORES) < 2, reason="one core, or a system that does not tell")
def test_costs_are_cached_per_cores_in_use():
    program = """import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1:]))
from speculative.drafting import cost_model as costs
from speculative.models.cores import usable_cores; print(usable_cores(), costs.key())"""

    def printed_on(cores):
        command = [sys.executable, "-c", program, *map(str, cores)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.split(" ", 1)

    one, two = printed_on(CORES[:1]), printed_on(CORES[:2])
    assert (one[0], two[0]) == ("1", "2") and one[1] != two[1]


def test_random_rollbacks_leave_the_cache_as_if_fresh(models):
    """Edits at random places, some far back; in the end every position's logits equal a fresh computation."""
    random = np.random.default_rng(0)
    for model in models:
        text = random.integers(1, model.vocab_size, 40)
        for _ in range(150):
            keep = int(random.integers(max(1, len(text) - 30), len(text) + 1))
            text = np.concatenate([text[:keep], random.integers(1, model.vocab_size, int(random.integers(1, 18)))])
            text = text[-900:] if len(text) < 900 else text[:60]
            model.logits(text, last=int(random.integers(1, min(len(text), 9))))
        used = model.logits(text, last=8).copy()
        model.reset()
        fresh = model.logits(text, last=8)
        assert np.abs(used - fresh).max() < 1e-3


@pytest.mark.parametrize("draft", [DRAFT, ROOT / "models/embedded/eagle3"], ids=["draft model", "head"])
def test_seed_clears_the_cache_memory(draft):
    """Traces of earlier texts in a block change the rounding of keys that OpenVINO quantizes by channel."""
    made = decoder.load(MAIN, draft, capacity=256)
    made.generate("class Point:", GenerationConfig(max_new_tokens=40))
    caches = [cache for model in made.models for cache in model.backend._caches]
    made.reset()
    assert all(cache.any() for cache in caches)
    made.reset(seed=1)
    assert not any(cache.any() for cache in caches)
