"""Packed products beside torch's: `python -m benchmarks.products`. Prints a table of the report.

Products of some rows and 60 weights [3072, 1024], more than caches hold. A turn is the next few weights.
Turns alternate; the least of thirty counts. Each begins after 30 ms of the same: OpenMP's threads spin for
some 13 ms after torch's turn, on the cores that ours need, and Linux takes a while to move threads to free
cores. "torch" is oneDNN with weights in its own packed layout for bfloat16, and torch's plain product for
float32. Ours are in huge pages, as a worker has them. oneDNN is left out where it has no instructions for
bfloat16.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.group_formats import FORMATS, GroupFormat
from kernels.grouped_weight import GroupedWeight
from kernels.linear import linear
from kernels.packed_weight import PackedWeight
from kernels.weight import Weight
from workers import huge_pages

_OUTPUTS, _INPUTS, _WEIGHTS = 3072, 1024, 60
_FORMATS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
_ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
_TURNS = 30
_TURN_ROWS = 120
_READ_BYTES = 128 << 20
_WARM_UP_S = 0.03

Product = Callable[[torch.Tensor, int], torch.Tensor]


def main() -> None:
    """Print GB/s of weights read, and GFLOP/s."""
    print(f"{library.kernel_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    print(f"a plain read: {_READ_BYTES / _least_s([numbers.sum])[0] / 1e9:.1f} GB/s")
    for dtype in (torch.bfloat16, torch.float32):
        weights = [torch.randn(_OUTPUTS, _INPUTS).to(dtype) for _ in range(_WEIGHTS)]
        products = {"ours": _ours(weights)}
        if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
            products["torch"] = _torch(weights)
        sizes = dict.fromkeys(products, weights[0].nbytes)
        if dtype is torch.bfloat16:
            for name in _FORMATS:
                quantised = [_quantised(FORMATS[name]) for _ in range(_WEIGHTS)]
                sizes[name], products[name] = quantised[0].nbytes, _by_linear(quantised)
        for rows in _ROWS:
            x = torch.randn(rows, _INPUTS).to(dtype)
            count = max(_TURN_ROWS // rows, 1)
            runs = [
                functools.partial(_run, product, x, cycle(range(_WEIGHTS)), count)
                for product in products.values()
            ]
            for name, taken_s in zip(products, _least_s(runs), strict=True):
                read, flop = count * sizes[name], 2 * rows * count * _OUTPUTS * _INPUTS
                rates = f"{read / taken_s / 1e9:6.1f} GB/s {flop / taken_s / 1e9:7.0f} GFLOP/s"
                print(f"{dtype} {rows:5} rows, {name:5} {rates}")


def _run(product: Product, x: torch.Tensor, indices: Iterator[int], count: int) -> None:
    for index in islice(indices, count):
        product(x, index)


def _ours(weights: list[torch.Tensor]) -> Product:
    copies = [huge_pages.empty(tuple(weight.shape), weight.dtype, "cpu").copy_(weight) for weight in weights]
    return _by_linear([PackedWeight(copy, in_place=True) for copy in copies])


def _by_linear(weights: Sequence[Weight]) -> Product:
    return lambda x, index: linear(x, weights[index])


def _quantised(form: GroupFormat) -> Weight:
    """All scales are about 1."""
    made = GroupedWeight(
        _OUTPUTS, _INPUTS, torch.bfloat16, form, lambda size: huge_pages.empty((size,), torch.uint8, "cpu")
    )
    made.data.fill_(0x3C)
    return made


def _torch(weights: list[torch.Tensor]) -> Product:
    if weights[0].dtype is torch.bfloat16:
        pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        packed = [pack(weight, 32) for weight in weights]
        return lambda x, index: multiply(x, packed[index], None, "none", [], "")
    return lambda x, index: functional.linear(x, weights[index])


def _least_s(runs: Sequence[Callable[[], object]]) -> list[float]:
    least = [float("inf")] * len(runs)
    for _ in range(_TURNS):
        for index, run in enumerate(runs):
            until_s = time.perf_counter() + _WARM_UP_S
            while time.perf_counter() < until_s:
                run()
            began_s = time.perf_counter()
            run()
            least[index] = min(least[index], time.perf_counter() - began_s)
    return least


if __name__ == "__main__":
    main()
