"""Compare sources of draft tokens with simulated times: suffix decoding, a draft with fixed or adaptive K, both.

    python scripts/compare_sources.py models/embedded/main models/embedded/draft --max-prompts 20

benchmark.py measures the time of each source. Where the speed of a machine varies, differences of a few percent need
many rounds. Here, the models decode real texts, and each forward pass counts as long as the cost model says, measured
once for each size (cached, or read with `--costs` from an earlier result). With the same costs and `--seed`, the result
is the same. What the engine does outside the models does not count: 1 to 8 % of an iteration.

Columns:

    speedup    tokens per second relative to plain decoding, with a 95 % confidence interval over prompts
    tok/pass   new tokens per forward pass of the main model
    draft      forward passes of the draft model per forward pass of the main model

Then come the speedups by category of prompts, and ratios of sources. Above temperature 0 each source writes other
texts, so small differences may be chance: `--samples 3` decodes three texts per prompt there. Output: tables, then one
JSON object on the last line.
"""

from speculative.cli.program import exit_on, prepare_output

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speculative import decoder
from speculative.bench import fixed_costs, saved_result
from speculative.bench.fixed_costs import DecodedText
from speculative.bench.harness import BackgroundLoad, environment, output_file, time_in, write_outputs
from speculative.bench.methods import ADAPTIVE_LOOKUP, TWO_SOURCES, native_config, with_source
from speculative.bench.prompts import Prompt, read_prompts, shown_name, token_ids
from speculative.bench.reporting.gains_table import span
from speculative.cli.arguments import (
    add_pair_arguments,
    add_prompt_arguments,
    lengths,
    model_specs,
    refuse_unusable,
    temperatures,
)
from speculative.cli.number_types import positive_int, seed_number, two_or_more
from speculative.cli.parser import Parser
from speculative.cli.progress import tqdm
from speculative.drafting.lookup_policy import LookupDraftLength
from speculative.drafting.policy import LONGEST, AdaptiveDraftLength, Costs
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.pair.engines import NATIVE

SUFFIX, BOTH = "suffix decoding", "draft and suffix decoding"


class Decoded(NamedTuple):
    """What a source decoded at a temperature, summed up for each prompt."""

    source: str
    temperature: float
    samples: int  # texts per prompt
    texts: list[DecodedText]

    def only(self, category: str) -> "Decoded":
        """The prompts of one category."""
        return self._replace(texts=[text for text in self.texts if text.category == category])


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_pair_arguments(parser, without_draft="suffix decoding alone")
    add_prompt_arguments(parser, max_prompts=20)
    parser.add_argument(
        "--max-new-tokens", type=two_or_more, default=96, metavar="N", help="new tokens per text (default: 96)"
    )
    parser.add_argument(
        "-k", "--num-assistant-tokens", type=lengths, default="3", metavar="K",
        help="fixed draft lengths, 1-10 or 2,4,8 (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=temperatures, default="0,1", metavar="T",
        help="sampling temperatures, like 0,0.7,1; 0 is greedy (default: 0,1)",
    )  # fmt: skip
    parser.add_argument(
        "--costs", type=saved_costs, metavar="FILE", help="use the costs of an earlier result of this program (JSON)"
    )
    parser.add_argument(
        "--samples", type=positive_int, default=1, metavar="N", help="texts per prompt above temperature 0 (default: 1)"
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N",
        help="seed of the first text of each prompt; others take the seeds after it (default: 0)",
    )  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the JSON of the last line to FILE")
    parser.set_defaults(csv=None, html=None, png=None)
    arguments = parser.parse_args()
    if (k := max(arguments.num_assistant_tokens)) > LONGEST:
        parser.error(f"-k is {k}, but the costs are those of at most {LONGEST} draft tokens")
    return arguments


def saved_costs(text: str) -> Costs:
    """An argparse type: the costs in a result of this program."""
    try:
        costs = saved_result.read(Path(text))["costs"]
        return Costs(**{**costs, "main": {int(n): float(seconds) for n, seconds in costs["main"].items()}})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a result of compare_sources.py") from None


def sources(has_draft: bool, ks: list[int]) -> dict[str, int | str]:
    """The names of the sources, and their draft lengths as `with_source` takes them."""
    draft_sources = {**{f"draft, K = {k}": k for k in ks}, "draft, adaptive": "adaptive", BOTH: TWO_SOURCES}
    return {SUFFIX: ADAPTIVE_LOOKUP, **(draft_sources if has_draft else {})}


def measure(arguments: argparse.Namespace, prompts: list[Prompt], ids: list[np.ndarray]) -> tuple[list[Decoded], Costs]:
    """The texts of each source, and the costs of forward passes."""
    main, draft = model_specs(arguments)
    engine = decoder.load(main, draft, max_ngram_size=None if draft else LONGEST_MATCH)
    assert isinstance(engine.draft_length, (AdaptiveDraftLength, LookupDraftLength))
    costs = engine.draft_length.costs = arguments.costs or engine.draft_length.costs
    forward_passes = [time_in(model) for model in engine.models]
    categories = [prompt.category or "other" for prompt in prompts]
    decoded = []
    draft_lengths = sources(draft is not None, arguments.num_assistant_tokens)
    samples = {temperature: arguments.samples if temperature else 1 for temperature in arguments.temperature}
    with tqdm(total=len(draft_lengths) * sum(samples.values()) * len(ids), unit="text", leave=False) as bar:
        for temperature, count in samples.items():
            for name, draft_length in draft_lengths.items():
                bar.set_description(f"{name}, temperature {temperature:g}")
                source_engine = with_source(engine, draft_length)
                config = native_config(draft_length, temperature, arguments.max_new_tokens)
                runs = [
                    fixed_costs.decode_all(
                        source_engine, config, ids, categories, costs, forward_passes, arguments.seed + i, bar.update
                    )
                    for i in range(count)
                ]
                texts = [fixed_costs.total(samples_of_prompt) for samples_of_prompt in zip(*runs, strict=True)]
                decoded.append(Decoded(name, temperature, count, texts))
    return decoded, costs


# ---- rows, tables and sentences -------------------------------------------------------------------------------------


def row_of(decoded: Decoded, costs: Costs) -> dict:
    texts, plain = decoded.texts, fixed_costs.plain(decoded.texts, costs)
    passes = sum(text.passes for text in texts)
    return {
        "name": f"{decoded.source}, temperature {decoded.temperature:g}",
        "source": decoded.source,
        "temperature": decoded.temperature,
        "speedup": fixed_costs.rate(texts) / fixed_costs.rate(plain),
        "speedup_range": fixed_costs.interval(texts, plain),
        "tokens_per_forward": sum(text.tokens for text in texts) / passes,
        "draft_passes": sum(text.draft_passes for text in texts) / passes,
        "texts": len(texts) * decoded.samples,
    }


def categories_of(decoded: Decoded, costs: Costs) -> list[dict]:
    rows = []
    for category in sorted({text.category for text in decoded.texts}):
        texts = decoded.only(category).texts
        speedup = fixed_costs.rate(texts) / fixed_costs.rate(fixed_costs.plain(texts, costs))
        name = {"source": decoded.source, "temperature": decoded.temperature}
        rows.append({"category": category, **name, "speedup": speedup, "texts": len(texts) * decoded.samples})
    return rows


def ratios_of(decoded: list[Decoded]) -> list[dict]:
    """The adaptive draft length and both sources, relative to the best of the others; of both sources also the lowest
    category."""
    ratios = []
    for temperature in dict.fromkeys(one.temperature for one in decoded):
        by_source = {one.source: one for one in decoded if one.temperature == temperature}
        fixed = [one for name, one in by_source.items() if name.startswith("draft, K")]
        single = [one for name, one in by_source.items() if name != BOTH]
        for name, others in (("draft, adaptive", fixed), (BOTH, single)):
            if name in by_source and others:
                ratios.append(ratio_of(by_source[name], others))
        if BOTH in by_source:
            ratios.append(lowest_by_category(by_source[BOTH], single))
    return ratios


def lowest_by_category(decoded: Decoded, others: list[Decoded]) -> dict:
    """The ratio of a source in the category in which it is the lowest."""
    categories = sorted({text.category for text in decoded.texts})
    ratios = [ratio_of(decoded.only(one), [other.only(one) for other in others]) for one in categories]
    category, lowest = min(zip(categories, ratios, strict=True), key=lambda entry: entry[1]["ratio"])
    return {**lowest, "what": f"{lowest['what']}, lowest category ({category})"}


def ratio_of(decoded: Decoded, others: list[Decoded]) -> dict:
    """Tokens per second of a source relative to the best of `others`."""
    best = max(others, key=lambda one: fixed_costs.rate(one.texts))
    ratio = fixed_costs.rate(decoded.texts) / fixed_costs.rate(best.texts)
    what = f"{decoded.source} / {best.source}, temperature {decoded.temperature:g}"
    return {"what": what, "ratio": ratio, "range": fixed_costs.interval(decoded.texts, best.texts)}


def table(rows: list[dict]) -> str:
    lines = [f"{'source':<28}{'temperature':>11}   {'speedup (95 %)':>19}   {'tok/pass':>8}   {'draft':>5}"]
    for row in rows:
        speedup = f"{row['speedup']:>6.2f}x{span(row['speedup_range'])}"
        lines.append(
            f"{row['source']:<28}{row['temperature']:>11g}   {speedup:<19}"
            f"   {row['tokens_per_forward']:>8.2f}   {row['draft_passes']:>5.2f}"
        )
    return "\n".join(lines)


def categories_table(rows: list[dict], temperature: float) -> str:
    """The speedups by category and source at a temperature."""
    rows = [row for row in rows if row["temperature"] == temperature]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    speedups = {(row["category"], row["source"]): row["speedup"] for row in rows}
    lines = [f"{f'category, T = {temperature:g}':<24}{'texts':>6}   " + "   ".join(sources)]
    for category, texts in {row["category"]: row["texts"] for row in rows}.items():
        cells = (f"{speedups[category, source]:>{len(source)}.2f}" for source in sources)
        lines.append(f"{category:<24}{texts:>6}   " + "   ".join(cells))
    return "\n".join(lines)


def summary(rows: list[dict], ratios: list[dict]) -> list[str]:
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        best = max((row for row in rows if row["temperature"] == temperature), key=lambda row: row["speedup"])
        lines.append(
            f"Fastest at temperature {temperature:g}: {best['source']}, {best['speedup']:.2f}x plain decoding"
            f"{span(best['speedup_range'])}."
        )
    return lines + [f"{one['what']}: {one['ratio']:.2f}{span(one['range'])}" for one in ratios]


def main() -> int:
    prepare_output()
    arguments = parse_arguments()
    refuse_unusable(arguments, NATIVE)
    with exit_on(ValueError, status=2):
        prompts = read_prompts(arguments.prompts, arguments.max_prompts)
        ids = token_ids(prompts, arguments.main, arguments.max_new_tokens)
    with exit_on(RuntimeError, ValueError), BackgroundLoad() as load:
        decoded, costs = measure(arguments, prompts, ids)
    rows, ratios = [row_of(one, costs) for one in decoded], ratios_of(decoded)
    categories = [row for one in decoded for row in categories_of(one, costs)]
    facts = {
        **environment(arguments, load),
        "prompts": f"{len(prompts)} of {shown_name(arguments.prompts)}",
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "samples": arguments.samples,
    }
    result = {
        "program": "compare_sources",
        "summary": summary(rows, ratios),
        "environment": facts,
        "rows": rows,
        "categories": categories,
        "ratios": ratios,
        "costs": asdict(costs),
    }
    tables = [table(rows), *(categories_table(categories, temperature) for temperature in arguments.temperature)]
    write_outputs(arguments, result, "\n\n".join([*tables, "\n".join(result["summary"])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
