"""A model that thinks: the embedded draft with the chat template of a thinking model, and with two of the tokens that
it writes spelled <think> and </think>."""

import re
import shutil
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import openvino_tokenizers  # noqa: F401 -- registers the operations of tokenizers
from openvino import opset13

from speculative import batch_decoder
from tests.support.paths import DRAFT

CORE = openvino.Core()  # it must live longer than the operations of tokenizers in a model
HI = {"role": "user", "content": "Write code to count the words of a text."}
# Qwen3's, shortened; with `opens`, the prompt opens the reasoning, as in that of DeepSeek-R1
TEMPLATE = """{%- for message in messages %}{{ message.role ~ ': ' }}
{%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
{{- message.content ~ '\\n' }}{% endfor %}{{ 'assistant: ' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- elif opens %}{{ '<think>\\n' }}{% endif %}"""


def save_thinking_model(folder: Path, messages: list[dict]) -> Path:
    """Save the model in `folder`. Its greedy answer to `messages` begins with <think>, and soon has a </think>; that to
    a prompt that opens the reasoning has a </think>."""
    save_model(folder / "plain")
    decoder = batch_decoder.load(folder / "plain")
    first, *answer = _greedy_answer(decoder, messages, opens=False)
    prompt = decoder.encode(messages).tolist()
    usual = set(_greedy_answer(decoder, messages, opens=True)[2:]) - {first, *prompt}
    end = next(token for i, token in enumerate(answer) if i > 3 and token in usual)
    return save_model(folder / "main", {first: "<think>", end: "</think>"})


def _greedy_answer(decoder: batch_decoder.BatchDecoder, messages: list[dict], **variables: bool) -> list[int]:
    history = openvino_genai.ChatHistory(messages)
    history.set_extra_context(variables)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = 30
    request = decoder.add_request(history, config)
    while not request.finished:
        decoder.step()
    return request.result.tokens


def save_model(folder: Path, spellings: dict[int, str] | None = None) -> Path:
    """Save the model in `folder`, with these spellings of token ids; by default the usual ones."""
    shutil.copytree(DRAFT, folder)
    tokenizer, detokenizer = folder / "openvino_tokenizer.xml", folder / "openvino_detokenizer.xml"
    without = re.sub('<\\w*chat_template value="[^"]*" ?/>', "", tokenizer.read_text(encoding="utf-8"))
    for file, text in ((tokenizer, without), (folder / "chat_template.jinja", TEMPLATE)):
        file.unlink()
        file.write_text(text, encoding="utf-8")
    model = CORE.read_model(DRAFT / detokenizer.name)
    (decoder,) = [op for op in model.get_ops() if op.get_type_name() == "VocabDecoder"]
    begins, ends, characters = (decoder.input_value(i).get_node().data.copy() for i in (1, 2, 3))
    for token, text in (spellings or {}).items():
        begins[token], ends[token] = len(characters), len(characters) + len(text)
        characters = np.concatenate([characters, np.frombuffer(text.encode(), np.uint8)])
    for i, values in enumerate((begins, ends, characters), 1):
        decoder.input(i).replace_source_output(opset13.constant(values).output(0))
    openvino.save_model(model, detokenizer, compress_to_fp16=False)
    return folder
