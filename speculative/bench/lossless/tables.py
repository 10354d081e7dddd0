"""Tables of the verdicts on losslessness."""

from typing import cast

from speculative.bench.lossless.methods import CheckedMethod
from speculative.bench.lossless.verdicts import POWER, Verdicts
from speculative.bench.result import ComparedRow, GreedyRow, SampledRow


def tables(verdicts: Verdicts, first: CheckedMethod, max_new_tokens: int, tokens: int, cells: int) -> str:
    """Both tables; between them a sentence if the `first` method could not be the reference."""
    lines = [table_of_texts(verdicts.greedy, max_new_tokens)]
    if verdicts.reference is not first:
        name = verdicts.reference and verdicts.reference.name
        instead = f"the texts are compared with {name}" if name else "no text could be compared"
        lines.append(f"{first.name} failed ({first.crash}): {instead}.")
    return "\n".join([*lines, "", table_of_draws(verdicts.sampled, tokens, cells)])


def table_of_texts(rows: list[GreedyRow], tokens: int) -> str:
    lines = [f"{f'greedy, {tokens} tokens':<42} same text   acceptance   verdict"]
    for row in rows:
        first = next(iter(sorted(row["differences"], key=lambda difference: difference["near_tie"])), None)
        position = ""
        if first:
            position = f" (prompt {first['prompt']}, token {first['token']}: logit margin {first['margin']:.2g})"
        same = f"{row['same']}/{row['prompts']}"
        lines.append(f"{row['path']:<42} {same:>9} {share(row['acceptance_rate']):>12}   {row['verdict']}{position}")
    return "\n".join(lines)


def table_of_draws(rows: list[SampledRow | ComparedRow], tokens: int, cells: int) -> str:
    title = f"sampled, {tokens} tokens in {cells} cells"
    lines = [f"{title:<42} requests  crashes  acceptance     TV  noise        p  finds   verdict"]
    for row in rows:
        numbers = " " * 29
        if compared_row := compared(row):
            finds = compared_row["detectable_total_variation"]
            numbers = (
                f"{compared_row['total_variation']:6.3f} {compared_row['noise']:6.3f} {compared_row['p_value']:8.2g} "
            )
            numbers += " " * 6 if finds is None else f"{finds:6.3f}"
        lines.append(
            f"{row['path']:<42} {row['requests']:>8} {row['crashes']:>8} {share(row['acceptance_rate']):>11} "
            f"{numbers}   {row['verdict']}"
        )
    return "\n".join([*lines, *power_sentences(rows)])


def power_sentences(rows: list[SampledRow | ComparedRow]) -> list[str]:
    """The meaning of "no difference found" at each sample size, and why a path was not compared."""
    detectable = {
        (compared_row["draws"], compared_row["detectable_total_variation"])
        for row in rows
        if row["holds"] and (compared_row := compared(row))
    }
    lines = [
        f"No difference found in {draws} samples: a TV above {finds:.3f} would have been detected with {POWER:.0%} "
        "power."
        for draws, finds in sorted(detectable)
    ]
    if any(row["verdict"] == "not compared" for row in rows):
        lines.append(
            "Not compared: no token sequence is likely enough to be counted at this sample size: use more --draws, "
            "fewer --tokens or a lower --temperature."
        )
    return lines


def compared(row: SampledRow | ComparedRow) -> ComparedRow | None:
    """The row if its samples were compared with their exact distribution."""
    return cast(ComparedRow, row) if "p_value" in row else None


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
