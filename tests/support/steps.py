"""Letting a batch decoder run to its end. A wrong one may never come to it: the test fails then, and does not hang."""

MOST = 2000  # steps, for texts of some hundred tokens


def finish(decoder, most=MOST):
    """What `decoder` gains until nothing is left to do."""
    gains = []
    for _ in range(most):
        gains += decoder.step()
        if not decoder.has_unfinished_requests:
            return gains
    raise AssertionError(f"the decoder is still busy after {most} steps")
