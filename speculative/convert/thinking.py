"""Turns a model's thinking off: its chat template then sets `enable_thinking` to false, unless a request sets it."""

import json
import re
from pathlib import Path

import openvino_genai

from speculative.convert.errors import ConvertError
from speculative.convert.source import Source
from speculative.pair import model_info, thinking_switch
from speculative.pair.thinking_switch import VARIABLE

OFF = f"{{%- if {VARIABLE} is not defined %}}{{%- set {VARIABLE} = false %}}{{%- endif %}}"
IN_IR = re.compile(rf'(<chat_template value=")(?=[^"]*{VARIABLE})')


def template_of(model: Source) -> str:
    """The chat template of a source. Raises ConvertError if its files are damaged."""
    read = (
        model_info.gguf_facts if model.is_gguf else model_info.ir_facts if model.is_ir else model_info.checkpoint_facts
    )
    try:
        return read(model.path).chat_template
    except model_info.UnusableFolder as error:
        raise ConvertError(str(error)) from error


def require(chat_template: str, name: str) -> None:
    """Raise ConvertError if the chat template of the model called `name` cannot turn thinking off."""
    if VARIABLE not in chat_template:
        raise ConvertError(f"the chat template of {name} has no {VARIABLE}; omit --no-thinking", 2)


def disable(folder: Path, name: str, is_required: bool) -> None:
    """Change the chat template in the IR folder of the model called `name`. A template without `enable_thinking` stays
    as it is, unless the change `is_required`. Raises ConvertError if the template cannot be changed."""
    if not (folder / "openvino_tokenizer.xml").is_file():  # an EAGLE-3 head
        return
    template = openvino_genai.Tokenizer(str(folder)).chat_template
    if is_required:
        require(template, name)
    elif VARIABLE not in template:
        return
    for file in folder.glob("openvino_*tokenizer.xml"):
        _write(file, IN_IR.sub(lambda found: found[1] + OFF, file.read_text(encoding="utf-8")))
    if (file := folder / "chat_template.jinja").is_file():
        _write(file, OFF + file.read_text(encoding="utf-8"))
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if isinstance(settings.get("chat_template"), str):
            settings["chat_template"] = OFF + settings["chat_template"]
            _write(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    if thinking_switch.is_on_by_default(openvino_genai.Tokenizer(str(folder))) is not False:
        raise ConvertError(f"the chat template of {name} cannot be changed; omit --no-thinking")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="\n")
