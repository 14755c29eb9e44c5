"""Triton's random numbers, with which the kernels draw, are those of the definition, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from triton import language as tl

from workers.counter_rng import mix_key, uniform

KEYS = [0, 1, 17, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
KEYS += [mix_key(seed, position) for seed in (0, 2**64 - 1) for position in (0, 131071)]
IDS = [*range(500), 32767, 65536, 151935, 262143, 2**31 - 1]
BLOCK = 512


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(ids, out, key, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, block)
    offsets = tl.load(ids + at, mask=at < n, other=0)
    tl.store(out + at, tl.rand(tl.load(key), offsets), mask=at < n)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("key", KEYS)
def test_uniform_equals_triton_rand(key: int, dtype: torch.dtype, device: str) -> None:
    ids, out = torch.tensor(IDS, dtype=dtype, device=device), torch.empty(len(IDS), device=device)
    # As rows have it: the bits in int64.
    keys = torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64)).to(device)
    draw_kernel[(1,)](ids, out, keys, len(IDS), block=BLOCK)
    ours = uniform(key, np.array(IDS, dtype=np.int64))
    assert out.view(torch.int32).tolist() == ours.view(np.int32).tolist()
