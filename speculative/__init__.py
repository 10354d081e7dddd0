"""Speculative decoding with OpenVINO GenAI: run, measure, tune and serve a pair of models.

    from openvino_genai import GenerationConfig
    from speculative import load

    decoder = load("models/embedded/main", "models/embedded/draft")
    print(decoder.generate("def read_file(path):", GenerationConfig(max_new_tokens=100)).text)

`load` returns a `Decoder` for one request at a time, `load_batch` a `BatchDecoder` for many. The engine is imported on
first use of one of these names, so that importing another module of the package stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculative.batch_decoder import BatchDecoder
    from speculative.batch_decoder import load as load_batch
    from speculative.decoder import Decoder, load
    from speculative.models.spec import ModelSpec
    from speculative.sequence.result import GenerationResult

__all__ = ["BatchDecoder", "Decoder", "GenerationResult", "ModelSpec", "load", "load_batch"]

_PLACES = {
    "BatchDecoder": ("speculative.batch_decoder", "BatchDecoder"),
    "Decoder": ("speculative.decoder", "Decoder"),
    "GenerationResult": ("speculative.sequence.result", "GenerationResult"),
    "ModelSpec": ("speculative.models.spec", "ModelSpec"),
    "load": ("speculative.decoder", "load"),
    "load_batch": ("speculative.batch_decoder", "load"),
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
