"""Request limits of a replica."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_prompt_tokens: int
    max_output_tokens: int
    max_num_seqs: int  # texts in the batch
    max_queue: int  # queued requests
    timeout: float  # seconds per request, queueing included
    body_timeout: float = 30.0  # seconds for receiving a request's body

    @property
    def open(self) -> int:
        """Requests a replica processes at once: accepted ones, and some whose bodies are still being received."""
        return self.max_num_seqs + self.max_queue + 32

    @property
    def ongoing(self) -> int:
        """Requests that Ray Serve may pass to a replica at once.

        More than it processes, so that the replica itself rejects requests, quickly and with an API error, and /health
        never waits for other requests.
        """
        return self.open + 64
