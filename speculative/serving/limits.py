"""What a replica takes on, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_prompt_tokens: int
    max_output_tokens: int
    max_running: int  # texts in the batch
    max_waiting: int  # requests before them
    timeout: float  # seconds for a request, its waiting included
    body_timeout: float = 30.0  # seconds in which a request's body has to come

    @property
    def open(self) -> int:
        """Requests that a replica looks at at once: those it has taken on, and some whose bodies are still coming."""
        return self.max_running + self.max_waiting + 32

    @property
    def ongoing(self) -> int:
        """Requests that Ray Serve may hand to a replica at once.

        More than it looks at: it is the replica that says no, in the API's words, and quickly, and /health never waits
        behind other requests.
        """
        return self.open + 64
