"""What operators read about the products in use."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import library
from workers.models.active_kernels import active_products


@pytest.mark.parametrize(
    ("dtype", "has", "compiled", "expected"),
    [
        ("bfloat16", "avx2", True, "cpu-avx2 (bfloat16 weights, float32 inputs and sums)"),
        ("bfloat16", "avx512bf16", True, "cpu-avx512bf16 (bfloat16 weights and inputs, float32 sums)"),
        ("float32", "avx512bf16", True, "cpu-avx512bf16 (float32 weights, inputs and sums)"),
        ("float16", "avx2", True, "torch: there are no float16 products for a CPU"),
        (
            "bfloat16",
            "avx2",
            False,
            "torch: there is no build of the CPU kernels; `make setup` compiles them with g++",
        ),
        ("bfloat16", "", False, "torch: this CPU has no AVX2"),
        ("float32", "none", False, "torch: QUIRE_CPU_ISA = none"),
    ],
)
def test_products_are_named_and_slow_ones_explained(
    monkeypatch: pytest.MonkeyPatch, dtype: str, has: str, compiled: bool, expected: str
) -> None:
    """On a CPU with an instruction set, or with too little, or with QUIRE_CPU_ISA = none."""
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    if has == "none":
        monkeypatch.setenv("QUIRE_CPU_ISA", has)
    flags = next((set(known.cpu_flags) for known in library.INSTRUCTION_SETS if known.name == has), {"sse2"})
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    monkeypatch.setattr(library, "available", lambda: compiled)
    library.instruction_set.cache_clear()
    try:
        found = active_products(torch.device("cpu"), dtype)
    finally:
        library.instruction_set.cache_clear()
    assert found == (expected if compiled and dtype != "float16" else f"{expected}; expect it to be slow")
