"""OpenTelemetry traces: a span per request, sent by OTLP over HTTP to the collector set in the environment.

The exporter is imported only if the environment has OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
OTEL_TRACES_EXPORTER=otlp; its other variables apply, too. Attributes are those of the semantic conventions for
generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), and `speculative.*` for draft tokens.
Spans contain no prompts and answers.
"""

import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from speculative.serving.api.base_request import BaseRequest
from speculative.serving.api.chat_completions import ChatCompletionRequest
from speculative.serving.engine.engine_thread import GenerationHandle

EXPORTER, PACKAGE = "opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"
SERVICE = "openvino-speculative"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES is set


def is_wanted() -> bool:
    """Whether the environment enables traces."""
    exporter = _variable("OTEL_TRACES_EXPORTER")
    if _variable("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none":
        return False
    return bool(exporter or _variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))


def problem() -> str | None:
    """The reason why the enabled traces cannot be sent, or None."""
    if not is_wanted():
        return None
    exporter = _variable("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        return f"OTEL_TRACES_EXPORTER is {exporter!r}, which this server does not have: use otlp or none."
    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        return f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, which this server does not have: use http/protobuf."
    try:
        spec = find_spec(EXPORTER)
    except ModuleNotFoundError:  # of a package that should contain it
        spec = None
    return None if spec else f"traces need OpenTelemetry's exporter: `pip install {PACKAGE}` installs it."


def variables() -> dict[str, str]:
    """OpenTelemetry's variables in the environment, for replicas on other machines."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def _variable(*names: str) -> str:
    """The value of the first of these variables that is set, or an empty string."""
    return next(filter(None, (os.environ.get(name, "").strip() for name in names)), "")


class Traces:
    """Sends spans in the background, so that requests never wait for the collector."""

    def __init__(self, model: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("speculative.serving")

    def send_span(
        self, request: BaseRequest, headers: Mapping[str, str], jobs: Sequence[GenerationHandle], error: str
    ) -> None:
        """Send the span of a request that ended. `headers` may have the context of its caller (`traceparent`); `error`
        is the code of the error that ended it, "disconnected", or empty."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode

        operation = "chat" if isinstance(request, ChatCompletionRequest) else "text_completion"
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            propagate.extract(headers),
            SpanKind.SERVER,
            self._attributes(operation, request, jobs),
            start_time=now - int(1e9 * (time.perf_counter() - jobs[0].submitted)),
        )
        if error:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", error)
        span.end(now)

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

    def _attributes(self, operation: str, request: BaseRequest, jobs: Sequence[GenerationHandle]) -> dict[str, Any]:
        started, first = (
            [job for job in jobs if job.request],
            jobs[:: request.texts_per_prompt],
        )  # the first job of each prompt
        ttft = jobs[0].first_token_time - jobs[0].submitted if request.stream and jobs[0].first_token_time else None
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "openvino",
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.stream": bool(request.stream),
            "gen_ai.request.choice.count": request.texts_per_prompt if request.texts_per_prompt > 1 else None,
            "gen_ai.request.max_tokens": jobs[0].config.max_new_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.seed": request.seed,
            "gen_ai.response.finish_reasons": [
                job.result.finish_reason for job in started if job.finished and not job.error
            ],
            "gen_ai.usage.input_tokens": sum(len(job.prompt) for job in first),
            "gen_ai.usage.cache_read.input_tokens": sum(job.cached_tokens for job in first),
            "gen_ai.usage.output_tokens": sum(len(job.result.tokens) for job in started),
            "gen_ai.response.time_to_first_chunk": ttft,
            "speculative.draft_tokens": sum(sum(job.result.proposed) for job in started),
            "speculative.accepted_tokens": sum(sum(job.result.accepted) for job in started),
        }
        return {name: value for name, value in attributes.items() if value is not None}
