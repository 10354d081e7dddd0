"""Fixtures of the server's tests: its HTTP application over the embedded pair, without Ray. A file may have others."""

import pytest

from speculative import batch_decoder
from speculative.models.spec import ModelSpec
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import Api


@pytest.fixture(scope="module")
def decoder():
    """The embedded pair in exact arithmetic."""
    return batch_decoder.load(ModelSpec(MAIN, properties={"EXECUTION_MODE_HINT": "ACCURACY"}), DRAFT)


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder) as api:
        yield api


@pytest.fixture(scope="module")
def client(api):
    with api.client() as client:
        yield client
