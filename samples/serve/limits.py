"""What a replica takes on, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_prompt_tokens: int
    max_output_tokens: int
    max_running: int  # texts in the batch
    max_waiting: int  # requests before them
    timeout: float  # seconds for a request, its waiting included
    max_body: int = 4 << 20  # bytes of a request

    @property
    def ongoing(self) -> int:
        """Requests that Ray Serve may hand to a replica at once.

        More than the replica takes on: it is the replica that says no, in the API's words, and quickly.
        """
        return 2 * (self.max_running + self.max_waiting) + 64
