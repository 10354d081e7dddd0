"""Streamed text ends before a stop string, however tokens split it, and no streamed text is ever retracted."""

import importlib
import itertools
import re
import sys

import openvino
import openvino_genai
import pytest

from speculative.sequence.detokenizer import IncrementalDetokenizer, cleans_up
from tests.support.paths import MAIN

LENGTH = 6
TEXTS = ["".join(letters) for letters in itertools.product("ab", repeat=LENGTH)]
STOPS = ["".join(letters) for n in (1, 2, 3, 4) for letters in itertools.product("ab", repeat=n)]


def splits(text):
    """Every way to cut `text` into pieces."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        ends = [i for i, cut in enumerate(cuts, start=1) if cut] + [len(text)]
        yield [text[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def could_begin(text, stops):
    """The length of the longest suffix of `text` that is a prefix of one of `stops`, by brute force."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


def check(pieces, stops, include, pushed):
    """Feed `pieces`, each a token, `pushed` at a time; compare with a search in the whole text."""
    text = "".join(pieces)
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    at, first = min(found, default=(len(text), ""))
    expected = text[: at + len(first) * include]
    stream, streamed, used = IncrementalDetokenizer(lambda ids: "".join(pieces[i] for i in ids), stops, include), "", 0
    for begin in range(0, len(pieces), pushed):
        tokens = list(range(begin, min(begin + pushed, len(pieces))))
        piece, taken = stream.push(tokens)
        streamed, used = streamed + piece, used + taken
        if stream.stopped:
            break
        token_ids = "".join(pieces[: tokens[-1] + 1])
        assert taken == len(tokens) and len(streamed) == len(token_ids) - could_begin(token_ids, stops)
        assert expected.startswith(streamed)
    streamed += stream.end()
    assert streamed == stream.text == expected and stream.stopped == bool(found)
    if found:  # with the token that completes the stop string, and no more
        assert len("".join(pieces[: used - 1])) < at + len(first) <= len("".join(pieces[:used]))


@pytest.mark.parametrize("stop", STOPS)
def test_stop_string_ends_the_text_for_any_token_split(stop):
    """Every text of six letters, every split of it into tokens; one, two or all tokens at a time."""
    for i, text in enumerate(TEXTS):
        for j, pieces in enumerate(splits(text)):
            check(pieces, [stop], include=(i + j) % 2 == 0, pushed=(1, 2, LENGTH)[(i + j) % 3])


@pytest.mark.parametrize("stops", [["ac", "b"], ["\n\n", "c"], ["aab", "c"], ["abc", "ba", "\n"]], ids=str)
def test_several_stop_strings_are_supported(stops):
    for text in ("aacab", "aaaac", "aabac", "a\n\nc", "ab\nab", "\nc\n\n", "aaabca"):
        for pieces in splits(text):
            check(pieces, stops, include=False, pushed=1)


def test_stop_string_can_span_two_real_tokens():
    """At any place in the text, and at any chunk boundary."""
    tokenizer = openvino_genai.Tokenizer(str(MAIN))
    tokens = tokenizer.encode("def is_prime(n):\n    return n > 1 and é == 2\n").input_ids.data[0].tolist()
    text = tokenizer.decode(tokens)
    ends = [tokenizer.decode(tokens[:i]) for i in range(len(tokens) + 1)]
    stops = [longer[len(end) :] for end, longer in zip(ends, ends[2:], strict=False) if "\ufffd" not in end + longer]
    assert len(stops) > 10 and all(stops)
    for stop in stops:
        for pushed in (1, 2, 3):
            stream, streamed = IncrementalDetokenizer(tokenizer.decode, [stop]), ""
            for begin in range(0, len(tokens), pushed):
                streamed += stream.push(tokens[begin : begin + pushed])[0]
                assert text[: text.index(stop)].startswith(streamed)
                if stream.stopped:
                    break
            assert streamed == stream.text == text[: text.index(stop)]


def steps_of_python(action):
    """The number of lines of Python that `action` executes, the same on every machine."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("stop", ["{}b", "b{}", "{}"], ids=["always a partial match", "no match", "repeated match"])
def test_long_stop_string_costs_no_more_time_per_token(stop):
    """One client's stop strings must not delay all requests."""

    def steps(length):
        stops = [stop.format(pattern * length) for pattern in ("a", "ca", "da", "ea")]
        stream = IncrementalDetokenizer(lambda ids: "a" * len(ids), [f"{stop}b" for stop in stops])
        return steps_of_python(lambda: [stream.push([0]) for _ in range(1500)])

    assert steps(1000) < 2 * steps(10)


CLEANED = [
    "mode =",
    " '",
    "main",
    "' ",
    " .",
    " is",
    " n",
    "'",
    "t",
    " n",
    "o",
    " ' ",
    "x",
    " '",
    "r",
    "e",
    " '",
    "v",
    "w",
    " !",
    "  ",
    ",",
    " '",
    "s",
    " n",
    "'",
    " ",
    "?",
    " a ",
    " b",
]


def cleaned(text):
    """As the detokenizers of openvino_tokenizers, with clean_up_tokenization_spaces."""
    return re.sub(
        r" ([.?!,])| ('[ms])| (') | ('[rv]e)| (n't)", lambda found: "".join(filter(None, found.groups())), text
    )


@pytest.mark.parametrize("stop", [(), ("main'.", "never")], ids=["no stop string", "stop string"])
@pytest.mark.parametrize("pushed", [1, 2, 7])
def test_spaces_removed_later_by_the_detokenizer_are_held_back(pushed, stop):
    for begin in range(len(CLEANED)):
        pieces = CLEANED[begin:] + CLEANED[:begin]
        stream = IncrementalDetokenizer(
            lambda ids, pieces=pieces: cleaned("".join(pieces[i] for i in ids)), stop, cleans_up=True
        )
        text = ""
        for i in range(0, len(pieces), pushed):
            text += stream.push(list(range(i, min(i + pushed, len(pieces)))))[0]
            if stream.stopped:
                break
        whole = cleaned("".join(pieces))
        expected = whole[: whole.index(stop[0])] if stop and stop[0] in whole else whole
        assert text + stream.end() == stream.text == expected


@pytest.mark.parametrize("last", [("s", "x"), (" ", ".", "x"), (" s", "x"), (" '", "s"), (" n", "'t")])
@pytest.mark.parametrize("before", [10, 11, 12, 13, 14, 15])
def test_window_end_does_not_split_a_clean_up(before, last):
    pieces = ["w"] * before + [" =", " '", " '", *last, " end", "."]
    stream = IncrementalDetokenizer(lambda ids: cleaned("".join(pieces[i] for i in ids)), cleans_up=True)
    assert "".join(stream.push([i])[0] for i in range(len(pieces))) + stream.end() == cleaned("".join(pieces))


def test_text_shortened_by_clean_up_is_sent_once():
    pieces = ["for", " n", " '", " ", "x"]
    stream = IncrementalDetokenizer(lambda ids: cleaned("".join(pieces[i] for i in ids)), cleans_up=True)
    assert "".join(stream.push([i])[0] for i in range(len(pieces))) + stream.end() == cleaned("".join(pieces))


@pytest.mark.parametrize(("before", "text"), [("x = '", "success'"), ("a ", ". b"), ("n", "'t")])
def test_clean_up_at_the_context_end_loses_no_characters(before, text):
    pieces = [before, *text]
    stream = IncrementalDetokenizer(lambda ids: cleaned("".join(pieces[i] for i in ids)), cleans_up=True, context=[0])
    assert "".join(stream.push([i])[0] for i in range(1, len(pieces))) + stream.end() == text


@pytest.mark.export
def test_real_tokenizer_with_clean_up_streams_its_text(tmp_path):
    openvino_tokenizers, transformers = (
        importlib.import_module(name) for name in ("openvino_tokenizers", "transformers")
    )
    text = "mode = 'main'\nx = 'success'\nIt 's n't , is it ? We 've \u00e9 ' y ' ."
    for cleans in (True, False):
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(MAIN / "tokenizer.json"), clean_up_tokenization_spaces=cleans
        )
        models = openvino_tokenizers.convert_tokenizer(fast, with_detokenizer=True)
        for model, name in zip(models, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
            openvino.save_model(model, tmp_path / f"{name}.xml")
        tokenizer = openvino_genai.Tokenizer(str(tmp_path))
        ids = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        assert cleans_up(tokenizer) == cleans and (tokenizer.decode(ids) == text) != cleans
        stream = IncrementalDetokenizer(tokenizer.decode, cleans_up=cleans)
        assert "".join(stream.push([token])[0] for token in ids) + stream.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("context", [[], [90], list(range(50, 90))])
def test_text_after_a_context_keeps_its_first_space(context):
    stream = IncrementalDetokenizer(lambda ids: "".join(f" {i}" for i in ids)[1:], context=context)
    text = "".join(stream.push([i])[0] for i in range(40)) + stream.end()
    assert text == stream.text == (" " if context else "") + " ".join(map(str, range(40)))


@pytest.mark.parametrize("pushed", [1, 3, 20])
def test_words_stay_separated_if_the_decoder_strips_first_space(pushed):
    """SentencePiece drops the space before the first token that it decodes, whichever that is."""
    stream = IncrementalDetokenizer(lambda ids: "".join(f" {i}" for i in ids)[1:])
    text = ""
    for begin in range(0, 100, pushed):
        text += stream.push(list(range(begin, min(begin + pushed, 100))))[0]
    assert text + stream.end() == " ".join(map(str, range(100)))
