"""The Grafana dashboard: its JSON is a dashboard model, and its panels' expressions are PromQL."""

import json

import pytest

from tests.support.dashboard import DASHBOARD, expressions, metrics_in

TOPICS = (
    *("num_requests_running", "num_requests_waiting", "request_success_total", "request_errors_total"),
    *("time_to_first_token_seconds_bucket", "request_time_per_output_token_seconds_bucket", "generation_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total", "kv_cache_usage_perc"),
    *("prefix_cache_hits_total",),
)


def missing(wanted, actual):
    """The paths of values in `wanted` that differ in `actual`, the dashboard as parsed by the model."""
    if isinstance(wanted, dict):
        return [f"{key}.{place}" for key in wanted for place in missing(wanted[key], actual.get(key))]
    if isinstance(wanted, list):
        pairs = zip(wanted, actual, strict=True)
        return [f"{i}.{place}" for i, pair in enumerate(pairs) for place in missing(*pair)]
    return [] if wanted == actual else [""]


def test_dashboard_is_valid_for_grafana_types():
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason="needs Python 3.11")
    from grafana_foundation_sdk.models.dashboard import Dashboard

    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    read = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert missing(dashboard, read) == []


def test_panels_do_not_overlap_or_share_ids():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (at["x"] + i, at["y"] + j) for at in (panel["gridPos"] for panel in panels)
        for i in range(at["w"]) for j in range(at["h"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_dashboard_shows_operator_metrics():
    shown = {name for expression in expressions() for name in metrics_in(expression)}
    assert not [topic for topic in TOPICS if not any(name.endswith(topic) for name in shown)]
