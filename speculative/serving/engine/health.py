"""Health check of a replica: a broken engine, or a forward pass that hangs.

A forward pass takes milliseconds with a small model, and minutes with a large one on a slow processor. The limit is
therefore derived from the costs measured on this machine.
"""

import time

from speculative.batch_decoder import PREFILL_CHUNK
from speculative.drafting.policy import LONGEST
from speculative.serving.engine.engine_thread import Engine

MIN_TIMEOUT = 120.0  # seconds always allowed for an iteration
TIMEOUT_FACTOR = 10.0  # multiple of the expected time of the most expensive iteration


def problem(engine: Engine) -> str | None:
    """What is wrong with the engine, or None."""
    if engine.error:
        return str(engine.error)
    since, timeout = engine.stepping_since, step_timeout(engine)
    if since and time.monotonic() - since > timeout:
        return f"an iteration has been running for more than {timeout:.0f} s"
    return None


def step_timeout(engine: Engine) -> float:
    """Seconds after which an iteration is considered to hang."""
    costs = engine.decoder.draft_length
    drafting = LONGEST * float(costs.draft(PREFILL_CHUNK + engine.max_num_seqs))
    verification = float(costs.main(PREFILL_CHUNK + engine.max_num_seqs * (LONGEST + 1)))
    return max(MIN_TIMEOUT, TIMEOUT_FACTOR * (drafting + verification))
