"""The Grafana dashboard: its JSON is a dashboard model, and its panels' expressions are PromQL."""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.dashboard import DASHBOARD, expressions, metrics_in

TOPICS = (
    *("num_requests_running", "num_requests_waiting", "request_success_total", "request_errors_total"),
    *("time_to_first_token_seconds_bucket", "request_time_per_output_token_seconds_bucket", "generation_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total", "kv_cache_usage_perc"),
    *("prefix_cache_hits_total",),
)


def missing(wanted, there):
    """Where `there`, as read by the model, lacks something of `wanted`."""
    if isinstance(wanted, dict):
        return [f"{key}.{place}" for key in wanted for place in missing(wanted[key], there.get(key))]
    if isinstance(wanted, list):
        pairs = zip(wanted, there, strict=True)
        return [f"{i}.{place}" for i, pair in enumerate(pairs) for place in missing(*pair)]
    return [] if wanted == there else [""]


def test_grafanas_own_types_know_all_that_is_in_the_dashboard():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert missing(dashboard, read) == []


def test_panels_do_not_overlap_and_share_no_id():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (at["x"] + i, at["y"] + j) for at in (panel["gridPos"] for panel in panels)
        for i in range(at["w"]) for j in range(at["h"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_shows_what_an_operator_watches():
    shown = {name for expression in expressions() for name in metrics_in(expression)}
    assert not [topic for topic in TOPICS if not any(name.endswith(topic) for name in shown)]
