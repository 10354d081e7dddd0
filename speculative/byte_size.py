"""Size in bytes as messages show it: "1.5 GB", "830.0 MB"."""


def byte_size(number: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number / 1e3:,.1f} KB"
