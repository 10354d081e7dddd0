"""Whether a replica can go on: what broke its engine, or an inference that hangs.

How long an inference may take depends on the model: a large one on a slow processor takes minutes for what a small one
does in milliseconds. So it is judged by what inferences have cost here so far.
"""

import time

from speculative.batch_decoder import PREFILL_CHUNK
from speculative.drafting.policy import LONGEST
from speculative.serving.engine_thread import Engine

LEAST = 120.0  # seconds that any iteration may take
TIMES = 10.0  # what the costliest iteration should take


def trouble(engine: Engine) -> str | None:
    """What is wrong, in words."""
    if engine.error:
        return str(engine.error)
    since, longest = engine.stepping_since, longest_step(engine)
    if since and time.monotonic() - since > longest:
        return f"an iteration takes longer than {longest:.0f} s"
    return None


def longest_step(engine: Engine) -> float:
    """Seconds that an iteration may take before it is thought to hang."""
    costs = engine.decoder.draft_length
    drafting = LONGEST * float(costs.draft(PREFILL_CHUNK + engine.max_running))
    checking = float(costs.main(PREFILL_CHUNK + engine.max_running * (LONGEST + 1)))
    return max(LEAST, TIMES * (drafting + checking))
