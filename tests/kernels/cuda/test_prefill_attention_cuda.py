"""Prefill attention against float64, with NaN in all memory that must not be read."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.cuda.compile_spec import SHARED_BYTES
from kernels.cuda.prefill_attention import prefill_attention
from tests.kernels.attention_features import FEATURES
from tests.kernels.cuda.attention_case import AttentionCase, make_case

torch.set_num_threads(1)

# A block of queries and a tile of keys are 16 rows and 16 keys in float32, 128 and 64 in bfloat16.
BOTH_TILES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ALL_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def prefill(case: AttentionCase, first: int = 0, shared_bytes: int = SHARED_BYTES[90]) -> torch.Tensor:
    """The result and its guard rows, unchecked; items before `first` are left out, and their rows NaN."""
    out = case.new_out()
    batch = case.batch
    skipped = sum(batch.query_lens[:first])
    prefill_attention(
        out[skipped : len(case.query)],
        case.query[skipped:],
        case.k_pages,
        case.v_pages,
        batch.page_tables[first:],
        batch.query_starts[first:],
        batch.context_lens[first:],
        scale=case.scale,
        sliding_window=case.window,
        shared_bytes=shared_bytes,
        **case.features,
    )
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 16, 70])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 63, 64, 65])
@BOTH_TILES
def test_chunks_that_start_anywhere(dtype: torch.dtype, start: int, window: int | None, device: str) -> None:
    items = [(length, start + length) for length in (1, 7, 8, 9, 33)]
    case = make_case(items, device, dtype=dtype, window=window)
    case.check(prefill(case))


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_lengths_around_a_block(length: int, window: int | None, device: str) -> None:
    """With one head to a group a block holds 128 tokens, else fewer."""
    for group in (1, 2):
        case = make_case([(length, length + 3)], device, group=group, dtype=torch.bfloat16, window=window)
        case.check(prefill(case))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 20])
@BOTH_TILES
def test_groups(group: int, dtype: torch.dtype, device: str) -> None:
    """Groups of 3, 5 and 7 leave rows of a block unused."""
    case = make_case([(11, 30), (1, 40), (45, 45)], device, group=group, dtype=dtype)
    case.check(prefill(case))


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@ALL_DTYPES
def test_head_widths(width: int, dtype: torch.dtype, device: str) -> None:
    case = make_case([(20, 90), (3, 3)], device, width=width, kv_heads=2, dtype=dtype)
    case.check(prefill(case))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@ALL_DTYPES
def test_features(dtype: torch.dtype, features: list[str], window: int | None, device: str) -> None:
    """In the part without masks and in the other; a group of 3 leaves rows unused; one item is padded."""
    items = [(1, 1), (5, 0), (20, 90), (33, 33), (1, 70)]
    case = make_case(items, device, group=3, kv_heads=2, dtype=dtype, window=window, features=features)
    case.check(prefill(case))


@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (24, 16), (16, 80)])
@ALL_DTYPES
def test_keys_and_values_of_different_widths(
    dtype: torch.dtype, width: int, value_width: int, device: str
) -> None:
    case = make_case(
        [(20, 90), (3, 3)], device, width=width, value_width=value_width, kv_heads=2, dtype=dtype
    )
    case.check(prefill(case))


def test_a_sink_among_scores_of_any_size(device: str) -> None:
    case = make_case([(30, 100), (3, 0)], device, group=3)
    case.features = {"sinks": torch.tensor([-5000.0, 0.0, 5000.0], device=device)}
    for factor in (1.0, 1000.0, -1000.0):
        case.scale = factor
        case.check(prefill(case))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_for_less_shared_memory(width: int, window: int | None, device: str) -> None:
    """128 queries and 32 keys, or 64 and 16: items that begin and end around both."""
    items = [(1, 33), (31, 48), (33, 96), (65, 65)]
    case = make_case(items, device, width=width, dtype=torch.bfloat16, window=window)
    case.check(prefill(case, shared_bytes=SHARED_BYTES[89]))


@pytest.mark.parametrize("page_size", [1, 8, 32, 128])
def test_page_sizes(page_size: int, device: str) -> None:
    case = make_case([(20, 90), (3, 130)], device, page_size=page_size, dtype=torch.bfloat16)
    case.check(prefill(case))


@BOTH_TILES
def test_padded_and_empty_items(dtype: torch.dtype, device: str) -> None:
    """Items without context become zeros whatever their queries hold; items without rows take none."""
    case = make_case([(0, 0), (5, 0), (0, 30), (20, 25), (0, 0), (1, 0)], device, dtype=dtype)
    expected = prefill(case)
    case.check(expected)
    case.query[:5] = float("nan")
    out = prefill(case)
    assert not out[:5].any() and not out[25].any() and torch.equal(out[5:25], expected[5:25])


def test_many_items_find_their_blocks(device: str) -> None:
    """More items than blocks of rows, of which most have one token."""
    case = make_case([(1 + item % 3 * (item % 5), 20 + item) for item in range(13)], device)
    case.check(prefill(case))


@pytest.mark.parametrize("first", [1, 3])
def test_a_part_of_a_batch(first: int, device: str) -> None:
    case = make_case([(1, 20), (1, 30), (4, 10), (20, 40), (2, 2)], device)
    whole, part = prefill(case), prefill(case, first)
    skipped = sum(case.batch.query_lens[:first])
    assert part[:skipped].isnan().all()
    assert torch.equal(part[skipped : len(case.query)], whole[skipped : len(case.query)])


@pytest.mark.parametrize("features", [[], *FEATURES[3:]], ids="+".join)
@BOTH_TILES
def test_bits_do_not_depend_on_other_items(dtype: torch.dtype, features: list[str], device: str) -> None:
    case = make_case([(6, 9), (0, 0), (33, 80), (1, 50)], device, dtype=dtype, features=features)
    together = prefill(case)
    starts = case.batch.query_starts.tolist()
    for item in (0, 2, 3):
        rows = slice(starts[item], starts[item + 1])
        alone = torch.full_like(together[rows], float("nan"))
        prefill_attention(
            alone,
            case.query[rows],
            case.k_pages,
            case.v_pages,
            case.batch.page_tables[item : item + 1],
            case.batch.query_starts[item : item + 2],
            case.batch.context_lens[item : item + 1],
            scale=case.scale,
            sliding_window=None,
            shared_bytes=SHARED_BYTES[90],
            **case.features,
        )
        assert torch.equal(alone, together[rows])


def test_large_scores_do_not_overflow(device: str) -> None:
    case = make_case([(30, 100)], device, dtype=torch.bfloat16)
    for factor in (1000.0, -1000.0):
        case.scale = factor
        case.check(prefill(case))


def test_indices_of_64_bits(device: str) -> None:
    case = make_case([(1, 40), (20, 20)], device)
    expected = prefill(case)
    for tensor in (case.batch.page_tables, case.batch.query_starts, case.batch.context_lens):
        tensor.data = tensor.long()
    assert torch.equal(prefill(case)[:21], expected[:21])


def test_nothing_to_do(device: str) -> None:
    assert prefill(make_case([], device)).isnan().all()
    assert prefill(make_case([(0, 0), (0, 5)], device)).isnan().all()


@pytest.mark.parametrize("seed", range(25))
def test_any_batch(seed: int, device: str) -> None:
    dice = random.Random(seed)
    lengths = [(dice.randint(0, 20), dice.randint(0, 60)) for _ in range(dice.randint(1, 5))]
    items = [(new, new + before) for new, before in lengths]
    window = dice.choice([None, dice.randint(1, 50)])
    group, features = dice.randint(1, 8), dice.choice([[], *FEATURES])
    case = make_case(items, device, group=group, window=window, features=features, seed=seed)
    case.check(prefill(case))
