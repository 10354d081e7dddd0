"""A forward pass that Ctrl-C does not leave running."""

import openvino as ov


def infer(request: ov.InferRequest) -> None:
    """Run `request`. Ctrl-C is raised after the forward pass: a running request refuses another one, and still reads
    its inputs."""
    try:
        request.start_async()
    finally:
        request.wait()
