"""Tensors with NaN beside what a kernel may read, and comparisons with references that round as it does."""

from __future__ import annotations

import torch

from tests.kernels.references import assert_close

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def surrounded(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The rows of a tensor [T, W] as a view into one that has NaN before and after each row."""
    rows, width = tensor.shape
    wide = torch.full((rows + 2, width + 16), torch.nan, dtype=tensor.dtype, device=device)
    view = wide[1:-1, 8:-8]
    view.copy_(tensor)
    return view


def far_apart(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Three rows [3, W], the last one 2^31 elements after the first; what lies between is never touched."""
    rows, width = tensor.shape
    assert rows == 3
    stride = 1 << 30
    storage = torch.empty_strided((2 * stride + width,), (1,), dtype=tensor.dtype, device=device)
    view = storage.as_strided((rows, width), (stride, 1))
    view.copy_(tensor)
    return view


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in every bit, NaN included."""
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def assert_rounded(
    actual: torch.Tensor, exact: torch.Tensor, roundings: int, sizes: torch.Tensor | None = None
) -> None:
    """Check a chain of products and quotients against its float64 value.

    In half precision each of the roundings changes an element by at most half a unit in the last place, which
    is epsilon / 2 of its size, and the products in between carry that along. In float32 it is `assert_close`.
    `sizes` bounds the sizes of what is rounded on the way, where that is larger than the result.
    """
    if actual.dtype == torch.float32:
        assert_close(actual.cpu(), exact)
        return
    assert torch.isfinite(actual).all(), "not finite"
    epsilon = torch.finfo(actual.dtype).eps
    allowed = (exact.abs() if sizes is None else sizes) * ((1 + epsilon / 2) ** roundings - 1) + 2e-6
    excess = ((actual.cpu().double() - exact).abs() - allowed).max().item()
    assert excess <= 0, f"{excess} more than {roundings} roundings cost"


def assert_same_roundings(actual: torch.Tensor, reference: torch.Tensor) -> None:
    """Check that a result in half precision was rounded where its reference rounds.

    The two may differ by float32 errors before a rounding, which changes it for one element in thousands. A
    rounding that is left out or moved changes a large part of the elements.
    """
    assert actual.dtype in (torch.bfloat16, torch.float16) and actual.shape == reference.shape
    differing = int((actual.cpu() != reference).sum())
    assert differing <= 0.01 * reference.numel(), f"{differing} of {reference.numel()} elements differ"
