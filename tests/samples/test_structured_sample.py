"""structured_output_lm.py generates text that matches a JSON schema or regular expression; errors are a sentence."""

import json
import re

import jsonschema
import pytest

from tests.samples.test_sample_errors import assert_one_sentence
from tests.samples.test_samples import figures
from tests.support.paths import DRAFT, MAIN, ROOT

SAMPLE = "samples/structured_output_lm.py"
SCHEMA = ROOT / "samples/function.schema.json"
PROMPT = "def read_file(path):"


@pytest.mark.parametrize("draft", [(), (DRAFT,)], ids=["suffix decoding", "draft"])
@pytest.mark.parametrize("options", [(), ("--temperature", 0.8, "--seed", 3)], ids=["greedy", "sampled"])
def test_text_follows_json_schema(run_here, draft, options):
    done = run_here(SAMPLE, MAIN, *draft, PROMPT, "--json-schema", SCHEMA, *options)
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert "acceptance rate" in figures(done.stderr)


def test_text_matches_regular_expression(run_here):
    done = run_here(SAMPLE, MAIN, DRAFT, PROMPT, "--regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ((), 2, "give either --json-schema or --regex"),
        (("--regex", "a", "--json-schema", SCHEMA), 2, "give either --json-schema or --regex"),
        (("--json-schema", "no/such.json"), 2, "no/such.json: No such file"),
        (("--regex", "a("), 1, "structured_output_config.regex is invalid: "),
    ],
)
def test_errors_are_one_sentence(run_here, options, status, words):
    assert_one_sentence(run_here(SAMPLE, DRAFT, PROMPT, *options), status, words)
