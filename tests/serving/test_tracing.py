"""OpenTelemetry traces, received by a collector of this test over OTLP."""

import http.server
import subprocess
import sys
import threading

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from speculative import batch_decoder
from speculative.serving.http import tracing
from speculative.serving.http.tracing import Traces
from tests.support.paths import DRAFT, MAIN
from tests.support.serving import PLAIN, Api

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "secret_name = 'Rumpelstiltskin'\n" * 3
VARIABLES = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED")


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


@pytest.fixture
def environment(monkeypatch):
    """A function that sets OpenTelemetry's variables and no others."""

    def set_variables(**variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def spans(collector):
    """The spans received: the service and each span with its attributes as a dict."""
    found = []
    for path, body in collector.got:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"]
            found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
    return [(service, span, {one.key: plain(one.value) for one in span.attributes}) for service, span in found]


def plain(value):
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def test_each_request_is_a_span_in_the_callers_trace(collector):
    traces = Traces("embedded")
    with Api(batch_decoder.load(MAIN, DRAFT), draft_length=4, traces=traces, max_output_tokens=30) as api:
        body = {"model": "embedded", "prompt": PROMPT, "temperature": 0.5, "seed": 3, "max_tokens": 20}
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        usage = httpx.post(f"{api.url}/completions", json=body, headers=headers, **PLAIN).json()["usage"]
        with api.client() as client:
            messages = [{"role": "user", "content": PROMPT}]
            for _ in client.chat.completions.create(model="embedded", messages=messages, stream=True):
                pass
    traces.close()

    (service, first, whole), (_, second, streamed) = spans(collector)
    assert service == tracing.SERVICE
    assert (first.name, second.name) == ("text_completion embedded", "chat embedded")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, CALLER)
    assert second.trace_id != first.trace_id and not second.parent_span_id
    assert first.kind == first.SPAN_KIND_SERVER and first.status.code == first.status.STATUS_CODE_UNSET
    assert first.start_time_unix_nano < first.end_time_unix_nano <= second.end_time_unix_nano
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "openvino",
        "gen_ai.request.model": "embedded",
        "gen_ai.response.model": "embedded",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "speculative.draft_tokens": accepted + rejected,
        "speculative.accepted_tokens": accepted,
    }
    assert whole == wanted and accepted + rejected > 0
    assert streamed["gen_ai.request.stream"] and streamed["gen_ai.response.time_to_first_chunk"] > 0
    assert all(b"Rumpelstiltskin" not in body for _, body in collector.got)


def test_failed_request_records_error_in_its_span(collector):
    traces = Traces("embedded")
    body = {"model": "embedded", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with Api(batch_decoder.load(DRAFT), traces=traces, timeout=0.05) as api:
        assert httpx.post(f"{api.url}/completions", json=body, **PLAIN).status_code == 504
    traces.close()
    [(_, span, attributes)] = spans(collector)
    assert span.status.code == span.status.STATUS_CODE_ERROR and attributes["error.type"] == "timeout"
    assert not attributes["gen_ai.response.finish_reasons"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318"}, False),
    ],
)
def test_environment_variables_enable_tracing(variables, wanted, environment):
    environment(**variables)
    assert tracing.is_wanted() == wanted and tracing.problem() is None


def test_unsupported_exporter_gives_one_sentence_error(environment, monkeypatch):
    environment(OTEL_TRACES_EXPORTER="zipkin")
    assert "'zipkin'" in tracing.problem()
    environment(OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert "'grpc'" in tracing.problem()
    environment(OTEL_TRACES_EXPORTER="otlp")
    monkeypatch.setattr(tracing, "EXPORTER", "opentelemetry.exporter.missing.http")
    assert f"`pip install {tracing.PACKAGE}`" in tracing.problem()


def test_exporter_is_imported_only_for_tracing():
    """FastAPI imports OpenTelemetry's API if it is installed."""
    program = "import speculative.serving.http.tracing, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert tracing.__name__ in found
    assert not [name for name in found if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
