"""What a request's result records of each step."""

import pytest
from openvino_genai import GenerationConfig

from speculative.sampling.params import SamplingParams
from speculative.sequence.output import OutputProcessor
from speculative.sequence.result import Step

LETTERS = "abcdefgh"


def processor(hides_stop_token=False, **config):
    params = SamplingParams.resolve(GenerationConfig(max_new_tokens=50, **config))
    return OutputProcessor(params, lambda ids: "".join(LETTERS[i] for i in ids), hides_stop_token=hides_stop_token)


def test_tokens_after_a_stop_string_are_not_counted():
    """The draft's tokens c, d, e and f are accepted, but the text ends with d."""
    output = processor(stop_strings={"d"}, include_stop_str_in_output=True)
    output.add_step(Step([0, 1], 0, 0))
    tokens, _ = output.add_step(Step([2, 3, 4, 5, 6], 4, 4))
    output.end()
    result = output.result
    assert tokens == [2, 3] and result.tokens == [0, 1, 2, 3] and result.finish_reason == "stop"
    assert (result.proposed, result.accepted, result.gained) == ([4], [2], [2])
    assert result.from_draft == [False, False, True, True] and result.text == "abcd"


@pytest.mark.parametrize("stops", [set(), {"z"}])
@pytest.mark.parametrize("include", [False, True])
def test_stop_token_can_be_hidden(stops, include):
    config = {"stop_strings": stops, "include_stop_str_in_output": include, "stop_token_ids": {3}}
    output = processor(hides_stop_token=True, **config)
    output.add_step(Step([0, 1], 0, 0))
    output.add_step(Step([2, 3], 1, 1))
    output.end()
    result = output.result
    assert result.text == ("abcd" if include else "abc") and result.finish_reason == "stop"
    assert result.tokens == [0, 1, 2, 3] and result.gained == [2]


def test_text_without_tokens_has_no_stop_token_to_hide():
    output = processor(hides_stop_token=True)
    assert output.end() == "" and output.result.text == ""


def test_all_tokens_are_counted_without_a_stop_string():
    output = processor()
    output.add_step(Step([0], 0, 0))
    output.add_step(Step([1, 2, 3], 2, 5))
    output.add_step(Step([4], 0, 5))
    output.end()
    result = output.result
    assert (result.proposed, result.accepted, result.gained) == ([5, 5], [2, 0], [3, 1])
    assert result.from_draft == [False, True, True, False, False] and result.finish_reason == "length"
