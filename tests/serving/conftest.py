"""Fixtures of the server's tests: its HTTP application over small models, without Ray. A file may have others."""

import pytest

from speculative import batch_decoder
from speculative.drafting.latency_curve import LatencyCurve
from speculative.models.spec import ModelSpec
from tests.support.noisy_draft import save_noisy_draft
from tests.support.paths import DRAFT
from tests.support.serving import Api
from tests.support.untimed import Untimed

SLOW, FAST = LatencyCurve({1: 0.030, 64: 0.060}), LatencyCurve({1: 0.002, 64: 0.004})  # seconds


@pytest.fixture(scope="session")
def noisy_draft(tmp_path_factory):
    return save_noisy_draft(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def decoder(noisy_draft):
    """The embedded draft as a fast main model, with a noisy copy of it as its draft, in exact arithmetic. Drafting
    would gain nothing here, so the costs given are those of a slower main model."""
    decoder = batch_decoder.load(ModelSpec(DRAFT, properties={"EXECUTION_MODE_HINT": "ACCURACY"}), noisy_draft)
    decoder.draft_length = Untimed(SLOW, FAST, FAST)
    return decoder


@pytest.fixture(scope="module")
def api(decoder):
    with Api(decoder) as api:
        yield api


@pytest.fixture(scope="module")
def client(api):
    with api.client() as client:
        yield client
