"""Sampling parameters: the settings of one request, resolved once from its `GenerationConfig` and its model's defaults.

A GenerationConfig does not determine the stop tokens, the number of tokens that fit, and the seed. The decoders resolve
these with `SamplingParams.resolve` when a request arrives; all lower layers use the result only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from openvino_genai import GenerationConfig, Tokenizer

from speculative.sampling.grammar import Grammar, Grammars

NEUTRAL = GenerationConfig()
GREEDY_TEMPERATURE = 1e-6  # decoding is greedy at and below it
LARGEST_BIAS = 1e30  # of a logit, which is a float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The settings of one request, valid and without open questions; `resolve` makes them.

    A field named like an option of `openvino_genai.GenerationConfig` has its meaning. `apply_chat_template` is not
    among them: it belongs to the prompt, and `Decoder.encode` reads it.
    """

    max_new_tokens: int  # at least 1; takes max_length and the context length into account
    min_new_tokens: int
    stop_token_ids: frozenset[int]  # end the output; empty with ignore_eos
    all_stop_token_ids: frozenset[int]  # have probability 0 before `min_new_tokens`, with ignore_eos too
    stop_strings: frozenset[str]
    include_stop_str_in_output: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    subtract_penalties: bool  # presence and frequency penalties have OpenAI's meaning instead of GenAI's
    num_assistant_tokens: int  # draft length, 0 if unset
    assistant_confidence_threshold: float  # 0 if unset
    tree_depth: int  # of a draft tree of num_assistant_tokens tokens: a chain of this length, and leaves; 0: no tree
    seed: int | None  # None: not reproducible
    grammar: Grammar | None  # that the text must follow
    logprobs: int  # most probable tokens of each place whose log-probabilities are wanted; 0: none are computed
    prompt_logprobs: int  # likewise, of the prompt
    logit_bias: tuple[tuple[int, float], ...]  # added to the logits of tokens, by token id

    @classmethod
    def resolve(
        cls,
        config: GenerationConfig,
        num_prompt_tokens: int = 0,
        context_length: int | None = None,
        default_stop_token_ids: frozenset[int] = frozenset(),
        subtract_penalties: bool = False,
        seed: int | None = None,
        grammars: Grammars | None = None,
        logit_bias: Mapping[int, float] | None = None,
        prompt_logprobs: int = 0,
    ) -> "SamplingParams":
        """Resolve `config` for a prompt of `num_prompt_tokens` tokens.

        `context_length` is the longest sequence in tokens, prompt included (None: no limit). The model's
        `default_stop_token_ids` apply unless `config` sets an `eos_token_id`; GenAI also drops them if `config` sets
        `stop_token_ids`. `seed` takes precedence over
        the config's `rng_seed`. `grammars` compiles the `structured_output_config`, which is not supported without.
        `logit_bias` (added to the logits of token ids) and `prompt_logprobs` are no options of GenAI.

        Raises ValueError, naming the setting, if `config` asks for anything but a single sampled sequence, if a value
        is out of range, if a grammar is invalid, or if the prompt leaves no room for new tokens.
        """
        _check_supported(config, grammars)
        max_new_tokens = _max_new_tokens(config, num_prompt_tokens, context_length)
        _check_ranges(config)
        _check_extensions(seed, logit_bias or {}, prompt_logprobs)
        structure = config.structured_output_config
        eos = default_stop_token_ids if config.eos_token_id < 0 else {config.eos_token_id}
        all_stop_token_ids = frozenset(config.stop_token_ids) | eos
        return cls(
            max_new_tokens=max_new_tokens,
            min_new_tokens=config.min_new_tokens,
            stop_token_ids=frozenset() if config.ignore_eos else all_stop_token_ids,
            all_stop_token_ids=all_stop_token_ids,
            stop_strings=frozenset(config.stop_strings),
            include_stop_str_in_output=config.include_stop_str_in_output,
            do_sample=config.do_sample,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            subtract_penalties=subtract_penalties,
            num_assistant_tokens=config.num_assistant_tokens or 0,
            assistant_confidence_threshold=config.assistant_confidence_threshold,
            tree_depth=config.tree_depth,
            seed=config.rng_seed or None if seed is None else seed,
            grammar=grammars.compile(structure) if grammars and structure else None,
            logprobs=config.logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=tuple((logit_bias or {}).items()),
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return not self.do_sample or self.temperature <= GREEDY_TEMPERATURE


def _check_supported(config: GenerationConfig, grammars: Grammars | None) -> None:
    """Raise ValueError, naming the setting, if `config` asks for anything but a single sampled sequence, or is
    invalid."""
    for name in ("num_beams", "num_return_sequences", "echo", "branching_factor"):
        value, neutral = getattr(config, name), getattr(NEUTRAL, name)
        if value != neutral:
            raise ValueError(f"{name}={value} is not supported here: leave it at {neutral}")
    for name in ("adapters", "parsers", *(() if grammars else ("structured_output_config",))):
        if getattr(config, name):
            raise ValueError(f"{name} is not supported here: leave it empty")
    if config.max_new_tokens < 1:
        raise ValueError("max_new_tokens is 0, but must be at least 1")
    if config.min_new_tokens > config.max_new_tokens:
        raise ValueError(f"min_new_tokens {config.min_new_tokens} is above max_new_tokens {config.max_new_tokens}")
    if config.num_assistant_tokens and config.assistant_confidence_threshold:
        raise ValueError("num_assistant_tokens and assistant_confidence_threshold exclude each other: set only one")
    if config.tree_depth > (config.num_assistant_tokens or 0):
        raise ValueError(
            f"tree_depth is {config.tree_depth}, but must be at most num_assistant_tokens, all tokens of the tree: "
            f"{config.num_assistant_tokens or 0}"
        )
    if not 0 <= config.assistant_confidence_threshold <= 1:
        raise ValueError(
            f"assistant_confidence_threshold is {config.assistant_confidence_threshold:g}, but must be from 0 to 1"
        )
    if min(config.stop_token_ids, default=0) < 0:
        raise ValueError(f"stop_token_ids has {min(config.stop_token_ids)}, but token ids start at 0")


def _max_new_tokens(config: GenerationConfig, num_prompt_tokens: int, context_length: int | None) -> int:
    """The most new tokens: the config's limit, or what is left of the context if that is less."""
    if context_length is not None and num_prompt_tokens >= context_length:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, but the context only fits {context_length - 1}: shorten it, "
            "or raise the capacity if the model's context is longer"
        )
    limit = config.max_new_tokens  # takes precedence over max_length, as in GenAI
    if limit == NEUTRAL.max_new_tokens:
        limit = config.max_length - num_prompt_tokens
    if limit < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens and max_length is {config.max_length}, which leaves no room "
            "for new tokens: raise it, or set max_new_tokens"
        )
    return limit if context_length is None else min(limit, context_length - num_prompt_tokens)


def _check_ranges(config: GenerationConfig) -> None:
    """Raise ValueError for a value that no distribution can be computed with."""
    for name, valid, range_ in (
        ("temperature", 0 <= config.temperature < math.inf, "0 or more (0 means greedy), and finite"),
        ("top_p", 0 < config.top_p <= 1, "above 0 and at most 1 (1 means off)"),
        ("min_p", 0 <= config.min_p < 1, "from 0 (off) to below 1"),
        ("repetition_penalty", config.repetition_penalty > 0, "above 0 (1 means off)"),
        ("presence_penalty", -2 <= config.presence_penalty <= 2, "from -2 to 2 (0 means off)"),
        ("frequency_penalty", -2 <= config.frequency_penalty <= 2, "from -2 to 2 (0 means off)"),
    ):
        if not valid:
            raise ValueError(f"{name} is {getattr(config, name):g}, but must be {range_}")


def check_seed(seed: int | None) -> None:
    """Raise ValueError for a seed that is none."""
    if seed is not None and not (isinstance(seed, Integral) and seed >= 0):
        raise ValueError(f"seed is {seed!r}, but must be a whole number from 0")


def _check_extensions(seed: int | None, logit_bias: Mapping[int, float], prompt_logprobs: int) -> None:
    """Raise ValueError for a seed, a bias or a number of log-probabilities that is none."""
    check_seed(seed)
    if not (isinstance(prompt_logprobs, Integral) and prompt_logprobs >= 0):
        raise ValueError(f"prompt_logprobs is {prompt_logprobs!r}, but must be a whole number from 0")
    for token, bias in logit_bias.items():
        if not (isinstance(token, Integral) and isinstance(bias, Real) and bias <= LARGEST_BIAS):  # nor NaN
            raise ValueError(
                f"logit_bias has {token!r}: {bias!r}, but maps token ids to numbers up to {LARGEST_BIAS:g}, or -inf to "
                "ban them"
            )


def stop_ids_of(folder: str | Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The default stop tokens of the model in `folder`, from its generation_config.json or its tokenizer; none if
    neither names one."""
    file = Path(folder, "generation_config.json")
    named = GenerationConfig(file).stop_token_ids if file.exists() else set()
    return frozenset(named or {tokenizer.get_eos_token_id()}) - {-1}  # -1: a tokenizer without an EOS token
