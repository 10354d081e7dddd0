"""NPU backend with static shapes: one network for prompts, another for up to 8 tokens at a time.

OpenVINO's NPUW builds both from one stateful IR and passes the KV cache between them, configured as GenAI does it. A
run drops all cached positions from its start on, but NPUW's attention mask keeps the ones of earlier, longer runs; so
the mask here covers the whole cache, padded with zeros. The first step after a prompt must start at the prompt's end,
or NPUW copies the wrong entries; a step that starts earlier recomputes the prompt. `NPUW_DEVICES=CPU` runs all this on
a CPU.
"""

from itertools import pairwise

import numpy as np
import openvino as ov

from speculative.models.inference import infer

DEFAULT_PROMPT = 1024  # GenAI's defaults for MAX_PROMPT_LEN and MIN_RESPONSE_LEN
DEFAULT_RESPONSE = 128
STEP = 8  # tokens in one forward pass after the prompt, unless NPUW_LLM_MAX_GENERATION_TOKEN_LEN overrides it
MAX_STEPS = 8  # a run of more steps is recomputed as a prompt, if it fits
# properties whose names in GenAI lack the prefix NPUW_LLM_; ++ adds to a network's default settings
GENAI_NAMES = {
    **{name: f"NPUW_LLM_{name}" for name in ("PREFILL_HINT", "GENERATE_HINT")},
    **{
        f"{adds}{name}": f"{adds}NPUW_LLM_{name}"
        for adds in ("", "++")
        for name in ("PREFILL_CONFIG", "GENERATE_CONFIG", "SHARED_HEAD_CONFIG")
    },
}


class NpuModel:
    """`run(start, tokens, last)` over the two networks."""

    kind = "NPU"
    supports_leaves = False
    hidden_states = None

    def __init__(
        self,
        model: ov.Model,
        device: str,
        properties: dict,
        capacity: int | None,
        context: int,
        window: int,
    ):
        """`capacity` is the wanted longest sequence in tokens, `context` the model's context length.

        The properties MAX_PROMPT_LEN and MIN_RESPONSE_LEN take precedence and mean the same as in GenAI; a prompt
        longer than MAX_PROMPT_LEN works, but slowly. Raises ValueError if the cache would be longer than the model's
        sliding `window` (0 without one): NPUW may keep only the window's entries, which cannot be rolled back.
        """
        properties = dict(properties)
        capacity = min(capacity or DEFAULT_PROMPT + DEFAULT_RESPONSE, context)
        self._prompt = int(properties.pop("MAX_PROMPT_LEN", min(capacity, DEFAULT_PROMPT)))
        response = int(properties.pop("MIN_RESPONSE_LEN", max(capacity - self._prompt, DEFAULT_RESPONSE)))
        self.capacity = min(self._prompt + response, context)
        self.chunk = self.capacity  # `run` splits into its own chunks
        if 0 < window < self.capacity:
            raise ValueError(
                f"the model's sliding window of {window} tokens cannot be rolled back on an NPU: use a CPU or GPU, or "
                f"MAX_PROMPT_LEN + MIN_RESPONSE_LEN up to {window}"
            )
        self._step = int(properties.get("NPUW_LLM_MAX_GENERATION_TOKEN_LEN", STEP))
        self._step = self._step if self._step == 1 else -(-self._step // 8) * 8  # as NPUW rounds it
        settings = _npuw_settings(properties, self._prompt, response, self._step)
        self._request = ov.Core().compile_model(model, device, settings).create_infer_request()
        per_token = sum(
            variable.get_info().data_shape[1].get_length() * variable.get_info().data_shape[3].get_length() * 2  # f16
            for variable in model.get_variables()
        )
        self.cache_bytes = (self._prompt + self.capacity) * per_token  # each of the two networks has one
        self._text = np.zeros(self.capacity, np.int64)  # the tokens in the cache
        self._new_prompt_length = 0  # length of a prompt without a step yet: the next step must start at its end
        self._inputs: dict[str, ov.Tensor] = {}  # the request does not keep their arrays alive

    def clear(self) -> None:
        """Nothing to do: entries that are not in use do not change others."""

    def run(self, start: int, tokens: np.ndarray, last: int) -> np.ndarray:
        """Write tokens [n] at positions start, start + 1, ... of the cache, dropping everything from `start` on.

        Returns logits float32 [last, V] after each of the last `last` tokens, as a view that the next run overwrites.
        """
        end = start + len(tokens)
        self._text[start:end] = tokens
        # a prompt's logits cover at most one step's tokens
        prompt_end = min(end - max(last - self._step, 0), self._prompt)
        restarts = start == 0 or (end - start > MAX_STEPS * self._step and prompt_end > start)
        if restarts or start < self._new_prompt_length:
            boundaries = [0, *range(prompt_end, end, self._step), end]
        else:
            boundaries = [*range(start, end, self._step), end]
        if len(boundaries) == 2:
            return self._infer(*boundaries)[-last:]
        rows = [self._infer(*ends).copy() for ends in pairwise(boundaries)]
        return np.concatenate(rows)[-last:]

    def _infer(self, start: int, end: int) -> np.ndarray:
        """Logits after the tokens from `start` to `end` (for a prompt, after its last tokens only), as a view."""
        n = end - start
        is_prompt = start == 0 and n > 1  # how NPUW recognizes a prompt
        if is_prompt:
            mask = np.ones((1, n), np.int64)
        else:
            mask = np.zeros((1, self.capacity + n), np.int64)
            mask[0, :start] = 1
            mask[0, -n:] = 1
        self._set("input_ids", self._text[None, start:end])
        self._set("attention_mask", mask)
        self._set("position_ids", np.arange(start, end, dtype=np.int64)[None])
        infer(self._request)
        self._new_prompt_length = end if is_prompt else 0
        logits = self._request.get_tensor("logits").data[0]
        return logits[-min(n, self._step, len(logits)) :]

    def _set(self, name: str, array: np.ndarray) -> None:
        self._inputs[name] = tensor = ov.Tensor(array, shared_memory=True)
        self._request.set_tensor(name, tensor)


def _npuw_settings(properties: dict, prompt: int, response: int, step: int) -> dict:
    """The properties with which NPUW builds both networks; `prompt`, `response` and `step` are in tokens."""
    return {
        **{GENAI_NAMES.get(name, name): value for name, value in properties.items()},
        "NPU_USE_NPUW": "YES",
        "NPUW_LLM": "YES",
        "NPUW_LLM_BATCH_DIM": 0,
        "NPUW_LLM_SEQ_LEN_DIM": 2,
        "NPUW_LLM_MAX_PROMPT_LEN": prompt,
        "NPUW_LLM_MIN_RESPONSE_LEN": response + step,  # a step needs extra room in the cache
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": step,
        "NPUW_LLM_GENERATE_PYRAMID": "NO",  # one mask for all lengths
    }
