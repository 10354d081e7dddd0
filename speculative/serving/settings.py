"""Settings of the server, with their defaults: the served pair, the limits of a replica, the deployment on Ray."""

from dataclasses import dataclass

from speculative.models.cached_model import CAPACITY
from speculative.models.spec import ModelSpec

API_KEY_VARIABLE = "SPECULATIVE_API_KEY"  # the environment variable with the API key, unless a file has keys
LARGEST = 1_000_000  # tokens or requests: the largest value of a limit


@dataclass(frozen=True)
class Pair:
    """The folders of `main` and `draft` are present on every machine; without a draft the main model decodes alone."""

    name: str  # model name in the API
    main: ModelSpec
    draft: ModelSpec | None
    draft_length: int | float = 0  # tokens per iteration; below 1: confidence threshold; 0: adaptive
    cache_tokens: int = CAPACITY  # KV-cache capacity for all requests together
    prefix_cache: bool = True  # share the KV cache of common prefixes
    suffix_decoding: bool = False  # instead of a draft, or beside it
    past_answers: int = 0  # tokens of past answers for suffix decoding to copy from


@dataclass(frozen=True)
class Limits:
    """Request limits of a replica."""

    max_prompt_tokens: int = LARGEST  # the model's context length limits it, too
    max_output_tokens: int = 1024
    max_num_seqs: int = 16  # requests in the batch
    max_queue: int = 64  # queued requests
    timeout: float = 600.0  # seconds per request, queueing included
    body_timeout: float = 30.0  # seconds for receiving a request's body

    @property
    def max_open_requests(self) -> int:
        """Requests a replica processes at once: accepted ones, and some whose bodies are still being received."""
        return self.max_num_seqs + self.max_queue + 32

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that Ray Serve may pass to a replica at once.

        More than it processes, so that the replica itself rejects requests, quickly and with an API error, and /health
        never waits for other requests.
        """
        return self.max_open_requests + 64


@dataclass(frozen=True)
class Settings:
    """Settings of the server and its deployment."""

    pair: Pair
    limits: Limits
    keys: frozenset[bytes] | None  # digests of the API keys (`middleware.digest`); None: no key is required
    resources: dict[str, float]  # Ray resources required per replica, except CPUs
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None  # of a Ray cluster; None: start Ray on this machine
    replicas: int = 1
    max_replicas: int | None = None  # under load; None: always `replicas`
    routing: str = "balanced"  # or "prefix": requests that begin alike go to the same replica
    num_cpus: int | None = None  # cores per replica; None: OpenVINO's default, which Ray counts as 1
    cors_origins: tuple[str, ...] = ()  # whose pages may use the server in a browser
    metrics_port: int = 8001  # of the local Ray, for Prometheus
    drain: float = 30.0  # seconds for finishing running requests when the server is stopped

    @property
    def resources_per_replica(self) -> dict[str, float]:
        """Ray resources required per replica, CPUs included."""
        return {"CPU": self.num_cpus or 1, **self.resources}
