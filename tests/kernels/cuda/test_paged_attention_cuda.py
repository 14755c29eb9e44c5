"""Mixed batches: every item is attended by one of the two kernels, and none by its neighbour's lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cuda import paged_attention as module
from tests.kernels.attention_features import FEATURES
from tests.kernels.cuda.attention_case import AttentionCase, make_case

torch.set_num_threads(1)

BATCHES = {
    "decodes": [(1, 5), (1, 300), (1, 0)],
    "prefills": [(5, 5), (40, 100)],
    "decodes first": [(1, 20), (1, 200), (9, 40), (1, 7)],
    "prefills first": [(9, 40), (1, 20), (1, 70)],
    "verifying": [(4, 100), (1, 50), (4, 33), (0, 8)],
    "one decode": [(1, 1)],
}


def attend(case: AttentionCase) -> torch.Tensor:
    out: torch.Tensor = module.paged_attention(
        case.query,
        case.k_pages,
        case.v_pages,
        case.batch,
        scale=case.scale,
        sliding_window=case.window,
        **case.features,
    )
    return out


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("name", BATCHES)
def test_mixed_batches(name: str, dtype: torch.dtype, window: int | None, device: str) -> None:
    case = make_case(BATCHES[name], device, kv_heads=2, dtype=dtype, window=window)
    out = attend(case)
    assert out.shape == case.query.shape and out.is_contiguous() and out.dtype == dtype
    case.check(out)


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("name", ["decodes", "decodes first"])
def test_features_in_mixed_batches(name: str, features: list[str], device: str) -> None:
    case = make_case(BATCHES[name], device, width=48, value_width=32, kv_heads=2, features=features)
    out = attend(case)
    assert out.shape == (len(case.query), 4, 32) and out.is_contiguous()
    case.check(out)


@pytest.mark.parametrize(
    ("name", "decoded", "prefilled"),
    [("decodes", 3, 0), ("prefills", 0, 2), ("decodes first", 2, 2), ("prefills first", 0, 3)],
)
def test_which_kernel_attends_what(
    name: str, decoded: int, prefilled: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """No launch that has nothing to do: in a decode step each one costs time."""
    items = {"decode_attention": 0, "prefill_attention": 0}
    for kernel in items:

        def count(*arguments: torch.Tensor, kernel: str = kernel, **options: object) -> None:
            items[kernel] = len(arguments[-1])

        monkeypatch.setattr(module, kernel, count)
    attend(make_case(BATCHES[name], device))
    assert items == {"decode_attention": decoded, "prefill_attention": prefilled}


@pytest.mark.parametrize("name", ["decodes", "decodes first", "prefills"])
def test_lengths_on_the_host_do_not_matter(name: str, device: str) -> None:
    """When a graph is captured they are upper bounds: the result follows the lengths on the device."""
    case = make_case(BATCHES[name], device)
    expected = attend(case)
    capacity = case.batch.page_tables.shape[1] * case.k_pages.shape[1]
    case.batch = replace(case.batch, context_lens_host=[capacity] * len(case.batch.query_lens))
    assert torch.equal(attend(case), expected)


def test_nothing_to_do(device: str) -> None:
    assert attend(make_case([], device)).shape == (0, 2, 32)
    assert attend(make_case([(0, 0), (0, 5)], device)).shape == (0, 2, 32)
