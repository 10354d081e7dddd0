"""recommended.json: what is written is read, and a file of format 1 is read as format 2."""

import json

import pytest

from speculative.pair import engines, recommendation

FORMER = {
    "format": 1,
    "use_draft": True,
    "best": "ours",
    "settings": {"alone": {"device": "CPU"}, "GenAI": {"device": "GPU"}, "ours": {"device": "NPU"}},
    "sentences": ["Use this draft: ours, K = 4"],
}
PRESENT = {
    **FORMER,
    "format": 2,
    "best": "native",
    "settings": {"alone": {"device": "CPU"}, "genai": {"device": "GPU"}, "native": {"device": "NPU"}},
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / recommendation.FILE


def test_written_recommendation_is_read_back(file):
    recommendation.write(file, {key: value for key, value in PRESENT.items() if key != "format"})
    assert json.loads(file.read_text(encoding="utf-8"))["format"] == recommendation.FORMAT == 2
    assert recommendation.read(file) == PRESENT


@pytest.mark.parametrize(("former", "present"), [("ours", "native"), ("GenAI", "genai"), ("alone", "alone")])
def test_format_1_is_converted(file, former, present):
    file.write_text(json.dumps({**FORMER, "best": former}), encoding="utf-8")
    assert recommendation.read(file) == {**PRESENT, "best": present}


@pytest.mark.parametrize("broken", [{"format": 1}, {"format": 1, "settings": [1], "best": ["ours"]}], ids=str)
def test_broken_file_of_format_1_stays_broken(file, broken):
    file.write_text(json.dumps(broken), encoding="utf-8")
    assert recommendation.read(file) == {**broken, "format": 2}


@pytest.mark.parametrize("content", ["[]", '{"format": 0}', '{"format": 3}', "{}", "{"])
def test_other_formats_are_rejected(file, content):
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"recreate it with `python scripts/tune\.py MAIN \[DRAFT\]`"):
        recommendation.read(file)


def test_engines_have_ids_and_display_names():
    for former, present in (("GenAI", engines.GENAI), ("ours", engines.NATIVE)):
        assert engines.engine_id(former) == engines.engine_id(present) == present
        assert engines.shown_engine(former) == engines.shown_engine(present) == former
    assert engines.engine_id("another") == engines.shown_engine("another") == "another"
