"""The CPU's instruction sets."""

import pytest

from speculative.models.cores import instruction_sets


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse4_2 avx2 sha_ni", "AVX2"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "AVX2, AVX-512, VNNI"),
        ("avx2 avx512f avx512_vnni avx_vnni amx_bf16 amx_tile amx_int8", "AVX2, AVX-512, VNNI, AMX"),
        ("fpu sse4_2", ""),
    ],
)
def test_instruction_sets_are_read_from_the_flags_of_the_first_core(tmp_path, flags, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        f"processor\t: 0\nflags\t\t: {flags}\nvmx flags\t: avx2x\n\nprocessor\t: 1\nflags\t\t: avx512f\n"
    )
    assert instruction_sets(cpuinfo) == expected


def test_instruction_sets_are_not_known_without_flags(tmp_path):
    assert instruction_sets(tmp_path / "missing") == ""
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert instruction_sets(tmp_path / "arm") == ""
