"""One table of batches for all attention kernels, each against float64."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.kernels.attention_case import (
    COMPILED,
    FEATURES,
    MANY_SPLITS,
    QUANTISED,
    SMALL,
    SPLIT,
    TORCH,
    TRITON,
    Item,
    attend,
    make_case,
)
from tests.kernels.conftest import HAS_TRITON
from tests.kernels.tree_batches import random_tree

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "fp32", BF16: "bf16", FP16: "fp16"}
CPU = (TORCH, COMPILED)
EVERYWHERE = (*CPU, TRITON)


@dataclass(frozen=True)
class Row:
    """A batch, and what it is combined with."""

    items: Sequence[Item]
    backends: Sequence[str]
    dtypes: Sequence[torch.dtype] = (F32, BF16)
    windows: Sequence[int | None] = (None,)
    features: Sequence[Sequence[str]] = ((),)
    shapes: Sequence[dict[str, int]] = ({},)


def decodes(*lengths: int) -> list[Item]:
    return [(1, length) for length in lengths]


def chunks(lengths: Sequence[int], starts: Sequence[int]) -> list[Item]:
    return [(length, start + length) for start in starts for length in lengths]


def trees(sizes: Sequence[int], starts: Sequence[int]) -> list[Item]:
    dice = random.Random(sum(starts))
    return [(random_tree(dice, size), start) for start in starts for size in sizes]


def parts_of_trees(before: int) -> list[Item]:
    """Trees of which earlier steps have computed some tokens; one is a single token, and yet no decode."""
    dice = random.Random(before)
    sizes = [(2, 1), (9, 8), (33, 12), (64, 30), (64, 63)]
    return [(random_tree(dice, tokens, computed), before) for tokens, computed in sizes]


def random_items(seed: int) -> list[Item]:
    dice = random.Random(seed)
    lengths = [(dice.randint(0, 20), dice.randint(0, 60)) for _ in range(dice.randint(1, 6))]
    return [(new, new + before) for new, before in lengths]


def groups(*sizes: int) -> list[dict[str, int]]:
    return [{"group": size} for size in sizes]


def widths(*sizes: int) -> list[dict[str, int]]:
    return [{"width": size} for size in sizes]


MIXED: list[Item] = [(1, 0), (1, 17), (1, 80), (5, 0), (20, 90), (33, 33), (1, 7)]
FEW_DECODES = decodes(0, 1, 17, 130)


def two_widths(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"width": width, "value_width": value_width} for width, value_width in pairs]


# Boundaries of the CUDA kernels: pages of 16; tiles of 16 keys in float32 and 64 in bfloat16, and half of
# that with less shared memory; blocks of 16 and 128 rows, which are 8 and 64 tokens for a group of 2. Of the
# CPU's: pages, 16 tokens of the kernel for few, 64 keys and 96 rows of the one for many, 512 keys of a task.
TABLE = {
    "decodes": Row(decodes(0, 1, 15, 16, 17, 63, 64, 65, 130), (TORCH, TRITON), windows=(None, 1, 16, 70)),
    "decodes in parts": Row(decodes(0, 1, 17, 64, 130), (SPLIT,), windows=(None, 16)),
    "more splits than keys": Row(decodes(0, 1, 300), (MANY_SPLITS,), (F32,)),
    "long decodes": Row(
        decodes(0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 511, 512, 513, 1100),
        (COMPILED,),
        windows=(None, 1, 16, 17, 600),
    ),
    "chunks of 8": Row(chunks((1, 8, 9), (0, 7, 15, 16)), (TORCH, TRITON), (F32,), (None, 1, 5, 17)),
    "chunks of 64": Row(chunks((33, 65), (0, 15, 63, 64)), (TRITON,), (BF16,), (None, 5, 70)),
    "few tokens": Row(
        chunks((2, 5, 15, 16), (0, 1, 15, 16, 17, 505, 512)), (COMPILED,), windows=(None, 1, 5, 16, 33, 520)
    ),
    "many tokens": Row(
        chunks((17, 33, 64, 70, 101), (0, 1, 15, 16, 63, 64, 65, 130)),
        (COMPILED,),
        windows=(None, 1, 17, 63, 64, 65, 130),
    ),
    "mixed": Row(MIXED, EVERYWHERE, (F32, BF16, FP16), (None, 24)),
    "verifies": Row([(4, 100), (1, 50), (4, 33), (0, 8)], EVERYWHERE),
    "many items": Row([(1 + item % 3 * (item % 5), 20 + item) for item in range(13)], EVERYWHERE, (F32,)),
    "groups": Row(
        [(1, 40), (11, 30), (45, 45)],
        (TRITON,),
        shapes=[a | {"kv_heads": 1} for a in groups(1, 3, 5, 16, 20)],
    ),
    "groups and widths of few tokens": Row(
        [(1, 20), (1, 33), (3, 18), (5, 5), (16, 40), (0, 7), (2, 0)],
        (COMPILED,),
        shapes=[a | b for a in groups(1, 2, 3, 4, 5, 6, 7, 8) for b in widths(16, 48, 80, 128, 256)],
    ),
    "groups and widths of many tokens": Row(
        [(1, 20), (40, 75), (16, 40), (0, 7), (20, 0), (101, 101)],
        (COMPILED,),
        (BF16,),
        shapes=[a | b for a in groups(1, 2, 3, 5, 8) for b in widths(32, 96, 128, 256)],
    ),
    "widths": Row([(1, 70), (1, 0), (20, 90), (3, 3)], (TRITON,), (BF16,), shapes=widths(64, 80, 128, 256)),
    "widths in float16": Row([(1, 70), (20, 40)], EVERYWHERE, (FP16,), shapes=widths(32, 80)),
    "different widths": Row(
        [(1, 70), (1, 0), (20, 90)], (TORCH, TRITON), shapes=two_widths((192, 128), (24, 16), (16, 80))
    ),
    "different widths of decodes": Row(
        FEW_DECODES, (SPLIT,), shapes=two_widths((192, 128), (24, 16), (80, 80))
    ),
    "different widths of few tokens": Row(
        [(1, 20), (1, 600), (3, 18), (1, 0), (16, 35)],
        (COMPILED,),
        features=[(), *FEATURES],
        shapes=two_widths((192, 128), (16, 256), (256, 16), (80, 64)),
    ),
    "different widths of many tokens": Row(
        [(40, 75), (1, 30), (101, 101)],
        (COMPILED,),
        (BF16,),
        features=[(), *FEATURES],
        shapes=two_widths((192, 128), (32, 256), (256, 32), (96, 64)),
    ),
    "less shared memory": Row(
        [(1, 33), (31, 48), (33, 96), (65, 65)], (SMALL,), (BF16,), (None, 20), shapes=widths(64, 256)
    ),
    "large pages": Row(
        MIXED, (COMPILED,), (F32, BF16), shapes=[{"page_size": size} for size in (32, 48, 128)]
    ),
    "large groups": Row([(1, 700), (9, 40), (20, 90)], (COMPILED,), shapes=groups(20, 71)),
    "page sizes": Row(
        [(1, 129), (20, 90), (3, 70)],
        (TORCH, TRITON),
        (BF16,),
        shapes=[{"page_size": size} for size in (1, 8, 32, 128)],
    ),
    # A group of 3 leaves rows of the CUDA kernels unused.
    "features": Row(MIXED[1:5], (TORCH, TRITON), features=FEATURES, shapes=groups(3)),
    "features in a window": Row(MIXED, (TORCH, TRITON), (BF16,), (20,), FEATURES[3:], groups(3)),
    "features of decodes": Row(FEW_DECODES, (SPLIT,), (BF16,), features=FEATURES, shapes=groups(3)),
    "features of few tokens": Row(
        [*decodes(0, 1, 16, 17, 512, 513, 1100), (3, 18), (16, 16), (5, 700)],
        (COMPILED,),
        windows=(None, 1, 17, 520),
        features=FEATURES,
        shapes=groups(3),
    ),
    "features of many tokens": Row(
        [(17, 17), (33, 64), (70, 200), (20, 0), (5, 40)],
        (COMPILED,),
        (BF16,),
        (None, 1, 65),
        FEATURES,
        groups(3),
    ),
    "pages of 8 bits": Row(
        [
            *decodes(0, 1, 15, 16, 17, 63, 64, 65, 513, 1100),
            (5, 700),
            (40, 75),
            (101, 130),
            *trees((2, 33), (17,)),
        ],
        (QUANTISED,),
        windows=(None, 1, 17, 600),
        features=[(), *FEATURES],
        shapes=[{"group": 3, "width": 80, "value_width": 64}, {"group": 1, "width": 16, "value_width": 256}],
    ),
    "trees": Row([*trees((2, 33), (17,)), *trees((7, 64), (63,))], (TORCH, TRITON), windows=(None, 5, 40)),
    "long trees": Row(
        trees((2, 5, 16, 17, 40, 64), (0, 15, 16, 70, 511, 513)), (COMPILED,), windows=(None, 1, 17)
    ),
    "trees beside others": Row([*decodes(20, 0), *parts_of_trees(20), (1, 80), (40, 43), (5, 0)], EVERYWHERE),
    "parts of trees": Row(parts_of_trees(512), (COMPILED,), windows=(None, 9)),
    "features of trees": Row(
        [(1, 30), *trees((7, 20), (20,)), (9, 22), (5, 0)],
        CPU,
        windows=(None, 20),
        features=FEATURES,
        shapes=groups(3),
    ),
    "all features of trees": Row(
        trees((20,), (0, 20)), (TRITON,), (F32,), (None, 20), FEATURES[3:], groups(3)
    ),
    "groups of trees": Row(trees((20,), (17,)), (TRITON,), shapes=groups(1, 20)),
    "widths of trees": Row(
        trees((7, 30), (20,)), (COMPILED,), (BF16,), shapes=two_widths((192, 128), (256, 32))
    ),
    **{
        f"random {seed}": Row(
            random_items(seed),
            EVERYWHERE if seed < 4 else (COMPILED,),
            (F32,),
            (random.Random(seed).choice([None, 3, 30]),),
            [random.Random(seed).choice([(), *FEATURES])],
            groups(1 + seed % 8),
        )
        for seed in range(10)
    },
}


Combination = tuple[str, torch.dtype, int | None, Sequence[str], dict[str, int]]


def is_possible(backend: str, dtype: torch.dtype, _: int | None, features: Sequence[str], __: object) -> bool:
    if backend in (COMPILED, QUANTISED) and dtype is FP16:
        return False
    return not (backend.startswith(TRITON) and "alibi_slopes" in features)


def pairs_of(combination: Combination) -> set[tuple[object, ...]]:
    *others, shape = combination
    return set(combinations([*enumerate(map(str, others)), *shape.items()], 2))


def few_of(combined: Sequence[Combination]) -> Iterator[Combination]:
    """So few that each two values of which one is combined with the other still are."""
    left = set[tuple[object, ...]]().union(*map(pairs_of, combined))
    while left:
        most = max(combined, key=lambda each: len(pairs_of(each) & left))
        left -= pairs_of(most)
        yield most


def cases() -> Iterator[ParameterSet]:
    """All combinations of each row's values with --thorough, and otherwise few of them."""
    for name, row in TABLE.items():
        parts = row.backends, row.dtypes, row.windows, row.features, row.shapes
        combined = [each for each in product(*parts) if is_possible(*each)]
        few = [*few_of(combined)]
        for each in combined:
            backend, dtype, window, features, shape = each
            told = [NAMES[dtype], str(window), "+".join(features), *map(str, shape.values())]
            marks = [pytest.mark.skipif(backend.startswith(TRITON) and not HAS_TRITON, reason="needs Triton")]
            if each not in few:
                marks.append(pytest.mark.thorough)
            label = "-".join([backend, name, *filter(None, told)]).replace(" ", "_")
            yield pytest.param(backend, row.items, dtype, window, features, shape, id=label, marks=marks)


@pytest.mark.parametrize(("backend", "items", "dtype", "window", "features", "shape"), list(cases()))
def test_as_in_float64(
    backend: str,
    items: Sequence[Item],
    dtype: torch.dtype,
    window: int | None,
    features: Sequence[str],
    shape: dict[str, int],
    device: str,
) -> None:
    cuda = backend.startswith(TRITON)
    case = make_case(
        items,
        device if cuda else "cpu",
        dtype=dtype,
        window=window,
        features=features,
        nan_before_window=backend != TORCH,
        eight_bits=backend == QUANTISED,
        **shape,
    )
    case.check(attend(case, backend), rounds_weights=backend != TORCH, any_order=backend == TORCH)
