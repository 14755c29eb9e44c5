"""Soft-capping, sinks and ALiBi mean what they mean in models that have them, by transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.references import assert_close
from tests.kernels.test_paged_attention import Case, make_case

HEADS, KV_HEADS, SCALE = 4, 2, 0.3
# One item with its whole context new, and one of a few tokens: both kernels of the CPU, and torch.
LENGTHS = [(40, 40), (3, 20), (1, 18)]
WIDTHS = pytest.mark.parametrize("width", [24, 32])


def item_of(case: Case, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [1, H, Q, D], keys and values [1, K, L, D], a mask [1, 1, Q, L] to add: the library's way."""
    start, length = int(case.batch.query_starts[index]), case.batch.query_lens[index]
    context = case.batch.context_lens_host[index]
    query = case.query[start : start + length].double().transpose(0, 1)[None]
    keys, values = (dense[index].double().transpose(0, 1)[None] for dense in (case.keys, case.values))
    hidden = torch.ones(length, context).triu(context - length + 1).bool()
    return (
        query,
        keys,
        values,
        torch.zeros(length, context).double().masked_fill(hidden, -torch.inf)[None, None],
    )


def check(case: Case, library: Callable[..., Any], **told: Any) -> None:
    """Compare each item with `library(query, keys, values, mask)`, which gives [1, Q, H, D] in float64."""
    case.scoring = told
    actual = case.run(scale=SCALE)
    exact = torch.cat([library(*item_of(case, index))[0] for index in range(len(LENGTHS))])
    assert_close(actual, exact.double())


@WIDTHS
def test_softcap_of_gemma2(width: int) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False)

    def library(*tensors: Any) -> Any:
        told: dict[str, Any] = {"scaling": SCALE, "softcap": 1.5}
        return eager_attention_forward(module, *tensors, **told)[0]

    check(make_case(LENGTHS, heads=HEADS, kv_heads=KV_HEADS, width=width), library, softcap=1.5)


@WIDTHS
def test_sinks_of_gpt_oss(width: int) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    sinks = torch.tensor([-1.0, 0.0, 1.0, 4.0])
    module: Any = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks.double())

    def library(*tensors: Any) -> Any:
        told: dict[str, Any] = {"scaling": SCALE}
        return eager_attention_forward(module, *tensors, **told)[0]

    check(make_case(LENGTHS, heads=HEADS, kv_heads=KV_HEADS, width=width), library, sinks=sinks)


@WIDTHS
def test_slopes_of_bloom(width: int) -> None:
    """The library adds slope * key position: by the softmax the same, and further from zero."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float32)[:, 0, 1].contiguous()

    def library(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        bias = build_alibi_tensor(torch.ones(1, keys.shape[2]), HEADS, torch.float64)
        scores = query @ keys.transpose(2, 3) * SCALE + bias + mask
        return (scores.softmax(-1) @ values).transpose(1, 2)

    case = make_case(LENGTHS, heads=HEADS, kv_heads=HEADS, width=width)
    check(case, library, alibi_slopes=slopes)
