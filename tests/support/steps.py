"""Runs a batch decoder until it is done. If it never finishes, the test fails instead of hanging."""

MOST = 2000  # steps, for texts of some hundred tokens


def finish(decoder, most=MOST):
    """Return the outputs of `decoder` until no request is left."""
    gains = []
    for _ in range(most):
        gains += decoder.step()
        if not decoder.has_unfinished_requests:
            return gains
    raise AssertionError(f"the decoder is still busy after {most} steps")
