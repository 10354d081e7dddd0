"""The Grafana dashboard's PromQL expressions, and the metrics in them."""

import json

import promql_parser

from tests.support.paths import ROOT

DASHBOARD = ROOT / "docs/grafana.json"


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def metrics_in(expression: str) -> set[str]:
    """The names of the metrics in a PromQL expression of a panel. Raises ValueError if it is none."""
    names = set()

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression.replace("$__rate_interval", "1m")), visit)
    return names
