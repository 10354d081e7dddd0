"""Sources of the tokens of a stream: `speculation` in its chunks, with `stream_options.include_draft_tokens`.

`tokens` lists the tokens whose text is complete since the previous chunk, each with its text and whether it is an
accepted draft token. `iterations` and `draft_tokens` count the main model's forward passes after the prompt and all
draft tokens since then. The `content` of a chunk may be shorter, because it withholds a possible stop string.
"""

from collections.abc import Callable

from speculative.batch_decoder import BatchDecoder
from speculative.models.eagle3_batch import BatchHead
from speculative.sequence.detokenizer import IncrementalDetokenizer
from speculative.serving.engine.engine_thread import GenerationHandle


def draft_source(decoder: BatchDecoder) -> str | None:
    """The source of draft tokens; None without one."""
    sources = []
    if decoder.draft:
        sources.append("eagle3" if isinstance(decoder.draft, BatchHead) else "draft_model")
    if decoder.suffix:
        sources.append("suffix_decoding")
    return "_and_".join(sources) or None


class TokenSources:
    """Reads the growing result of `job`. `decode` turns token ids into text; `cleans_up` is that of its tokenizer."""

    def __init__(self, job: GenerationHandle, decode: Callable[[list[int]], str], cleans_up: bool = False):
        self._job = job
        self._text = IncrementalDetokenizer(decode, cleans_up=cleans_up, context=job.context)
        self._tokens = self._iterations = 0  # read so far
        self._incomplete: list[dict] = []  # tokens with a part of a character

    def take(self, last: bool) -> dict:
        """The new tokens since the previous call; with `last`, also incomplete characters."""
        result = self._job.result
        end = len(result.from_draft)  # the decoding thread adds to it after adding the tokens
        new_tokens = self._incomplete
        num_complete = 0
        for i in range(self._tokens, end):
            text, _ = self._text.push([result.tokens[i]])
            new_tokens.append({"text": text, "from_draft": result.from_draft[i]})
            num_complete = len(new_tokens) if text else num_complete
        if last and new_tokens:
            new_tokens[-1]["text"] += self._text.end()
            num_complete = len(new_tokens)
        self._tokens, self._incomplete = end, new_tokens[num_complete:]
        proposed = result.proposed[self._iterations :]
        self._iterations += len(proposed)
        return {"tokens": new_tokens[:num_complete], "iterations": len(proposed), "draft_tokens": sum(proposed)}
