"""Split decode attention against float64, with NaN in all memory that must not be read."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.cuda import decode_attention as module
from kernels.cuda.decode_attention import MAX_SPLITS, decode_attention, num_splits_for
from tests.kernels.attention_features import FEATURES
from tests.kernels.cuda.attention_case import AttentionCase, make_case

torch.set_num_threads(1)

# Around a page of 16 and around the tiles: 16 keys in float32, 64 in bfloat16.
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 130)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
BOTH_TILES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ALL_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.fixture(autouse=True)
def _nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` returns, such as the partial results, is NaN."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def decode(case: AttentionCase, num_splits: int) -> torch.Tensor:
    """The result and its guard rows, unchecked."""
    out = case.new_out()
    decode_attention(
        out[: len(case.query)],
        case.query,
        case.k_pages,
        case.v_pages,
        case.batch.page_tables,
        case.batch.context_lens,
        scale=case.scale,
        sliding_window=case.window,
        num_splits=num_splits,
        **case.features,
    )
    return out


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 16, 20, 70])
@BOTH_TILES
def test_lengths_around_pages_and_tiles(
    dtype: torch.dtype, window: int | None, num_splits: int, device: str
) -> None:
    case = make_case([(1, length) for length in LENGTHS], device, dtype=dtype, window=window)
    case.check(decode(case, num_splits))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 20])
@BOTH_TILES
def test_groups(group: int, dtype: torch.dtype, device: str) -> None:
    case = make_case([(1, 70), (1, 9)], device, group=group, kv_heads=2, dtype=dtype)
    case.check(decode(case, 2))


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@ALL_DTYPES
def test_head_widths(width: int, dtype: torch.dtype, device: str) -> None:
    case = make_case([(1, 70), (1, 33)], device, width=width, kv_heads=2, dtype=dtype)
    for num_splits in (1, 2):
        case.check(decode(case, num_splits))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@ALL_DTYPES
def test_features(
    dtype: torch.dtype, features: list[str], window: int | None, num_splits: int, device: str
) -> None:
    """A group of 3 leaves rows unused; some splits are empty; one item is padded."""
    items = [(1, length) for length in (0, 1, 17, 130)]
    case = make_case(items, device, group=3, kv_heads=2, dtype=dtype, window=window, features=features)
    case.check(decode(case, num_splits))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (24, 16), (16, 80)])
@ALL_DTYPES
def test_keys_and_values_of_different_widths(
    dtype: torch.dtype, width: int, value_width: int, num_splits: int, device: str
) -> None:
    case = make_case([(1, 70), (1, 0)], device, width=width, value_width=value_width, kv_heads=2, dtype=dtype)
    case.check(decode(case, num_splits))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_sink_among_scores_of_any_size(num_splits: int, device: str) -> None:
    case = make_case([(1, 100), (1, 0)], device, group=3)
    case.features = {"sinks": torch.tensor([-5000.0, 0.0, 5000.0], device=device)}
    for factor in (1.0, 1000.0, -1000.0):
        case.scale = factor
        case.check(decode(case, num_splits))


@pytest.mark.parametrize("page_size", [1, 8, 32, 128])
def test_page_sizes(page_size: int, device: str) -> None:
    case = make_case([(1, 70), (1, 129)], device, page_size=page_size, dtype=torch.bfloat16)
    case.check(decode(case, 2))


@pytest.mark.parametrize("num_splits", [16, 17, 40])
def test_more_splits_than_tiles(num_splits: int, device: str) -> None:
    """Most splits are empty, and those that are not lie in more than one chunk of the second kernel."""
    case = make_case([(1, 300), (1, 1), (1, 0)], device)
    case.check(decode(case, num_splits))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_padded_item_gives_zeros(num_splits: int, device: str) -> None:
    case = make_case([(1, 0), (1, 18), (1, 0)], device)
    case.query[0] = float("nan")
    out = decode(case, num_splits)
    assert not out[0].any() and not out[2].any() and out[1].any()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("features", [[], *FEATURES[3:]], ids="+".join)
@BOTH_TILES
def test_bits_do_not_depend_on_other_items(
    num_splits: int, features: list[str], dtype: torch.dtype, device: str
) -> None:
    together = make_case([(1, 7), (1, 100), (1, 0), (1, 150)], device, dtype=dtype, features=features)
    out = decode(together, num_splits)
    batch = together.batch
    for item in range(4):
        alone = torch.full_like(out[:1], float("nan"))
        decode_attention(
            alone,
            together.query[item : item + 1],
            together.k_pages,
            together.v_pages,
            batch.page_tables[item : item + 1],
            batch.context_lens[item : item + 1],
            scale=together.scale,
            sliding_window=None,
            num_splits=num_splits,
            **together.features,
        )
        assert torch.equal(alone[0], out[item])


@HALF
def test_large_scores_do_not_overflow(dtype: torch.dtype, device: str) -> None:
    """Scores of thousands of either sign: the weights of all keys but one vanish."""
    case = make_case([(1, 100)], device, dtype=dtype)
    for factor in (1000.0, -1000.0):
        case.scale = factor
        for num_splits in (1, 2):
            case.check(decode(case, num_splits))


def test_indices_of_64_bits(device: str) -> None:
    case = make_case([(1, 40), (1, 20)], device)
    expected = decode(case, 2)
    case.batch.page_tables.data = case.batch.page_tables.long()
    case.batch.context_lens.data = case.batch.context_lens.long()
    assert torch.equal(decode(case, 2)[:2], expected[:2])


def test_pages_past_two_to_the_31_elements(device: str) -> None:
    case = make_case([(1, 20)], device, width=64, dtype=torch.float16)
    expected = decode(case, 1)
    near = case.batch.page_tables[0, :2].long()
    far = near + (1 << 31) // (16 * 64)
    # 4 GiB each, of which only what is touched takes up memory.
    for name in ("k_pages", "v_pages"):
        pages = getattr(case, name)
        moved = torch.empty_strided(
            (int(far.max()) + 1, *pages.shape[1:]), pages.stride(), dtype=pages.dtype, device=device
        )
        moved[far] = pages[near]
        setattr(case, name, moved)
    case.batch.page_tables[0, :2] = far
    assert torch.equal(decode(case, 1)[:1], expected[:1])


def test_no_items(device: str) -> None:
    assert decode(make_case([], device), 2).isnan().all()


def test_splits_fill_the_device_and_no_more() -> None:
    batches, heads = (1, 2, 3, 7, 16, 100, 256, 512), (1, 2, 5, 8, 32)
    contexts = (0, 1, 127, 128, 129, 1000, 4096, 32_768, 1 << 20)
    for batch, kv_heads, max_context, count in itertools.product(batches, heads, contexts, (1, 56, 132, 200)):
        splits = num_splits_for(batch, kv_heads, max_context, count)
        assert 1 <= splits <= MAX_SPLITS
        if splits > 1:
            # Each reads a good number of keys, and all programs run at once.
            assert (splits - 1) * module.MIN_SPLIT_KEYS < max_context
            assert batch * kv_heads * splits <= module.PROGRAMS_A_MULTIPROCESSOR * count


@pytest.mark.parametrize(
    ("batch", "kv_heads", "max_context", "expected"),
    [
        (1, 8, 32768, 49),
        (1, 8, 1024, 8),
        (8, 8, 32768, 6),
        (32, 8, 32768, 1),
        (256, 8, 1024, 1),
        (1, 1, 1, 1),
    ],
)
def test_splits_of_typical_buckets(batch: int, kv_heads: int, max_context: int, expected: int) -> None:
    assert num_splits_for(batch, kv_heads, max_context, 132) == expected
