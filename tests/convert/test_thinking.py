"""`--no-thinking`: the chat template of the pair turns thinking off, unless a request turns it on."""

import json
import re

import openvino_genai
import pytest

from convert import export_pair
from speculative.convert import thinking
from tests.support.paths import DRAFT, everything_in
from tests.support.thinking_model import HI, save_model

CONTEXTS = ({}, {"enable_thinking": True}, {"enable_thinking": False})


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    """A model with a template in Jinja, and none in its IR, as newer versions of optimum-intel write it."""
    return save_model(tmp_path_factory.mktemp("thinking") / "main")


def prompts(folder):
    tokenizer = openvino_genai.Tokenizer(str(folder))
    return [tokenizer.apply_chat_template([HI], add_generation_prompt=True, extra_context=one) for one in CONTEXTS]


def test_pair_is_exported_without_thinking(main, tmp_path, capsys):
    assert "enable_thinking" in openvino_genai.Tokenizer(str(main)).chat_template
    usual, on, off = prompts(main)
    assert usual == on != off
    command = [str(main), str(DRAFT), str(tmp_path / "pair")]
    for more, expected, copied in (
        ([], [usual, on, off], 2),
        (["--no-thinking"], [off, on, off], 2),
        (["--no-thinking"], [off, on, off], 0),
        ([], [usual, on, off], 2),
    ):
        assert export_pair.main(command + more) == 0
        assert capsys.readouterr().out.count("is OpenVINO IR already: copied") == copied
        assert prompts(tmp_path / "pair/main") == expected
    assert everything_in(tmp_path / "pair/main") == everything_in(main)


@pytest.mark.parametrize("place", ["IR", "settings"])
def test_every_place_of_a_template_is_changed(main, tmp_path, place):
    folder = save_model(tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    if place == "IR":
        xml = folder / "openvino_tokenizer.xml"
        value = re.sub('[<>"&\n]', lambda found: f"&#{ord(found[0])};", template)
        text = xml.read_text(encoding="utf-8")
        xml.write_text(text.replace("<rt_info>", f'<rt_info>\n<chat_template value="{value}" />', 1), encoding="utf-8")
    else:
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    assert prompts(folder) == prompts(main)
    thinking.disable(folder, "it", is_required=True)
    usual, on, off = prompts(folder)
    assert usual == off != on


def test_model_without_thinking_is_refused_before_the_export(tmp_path, capsys):
    command = [str(DRAFT), str(DRAFT), str(tmp_path / "pair"), "--no-thinking"]
    assert export_pair.main(command) == 2
    assert "has no enable_thinking; omit --no-thinking" in capsys.readouterr().err
    assert not (tmp_path / "pair").exists()
