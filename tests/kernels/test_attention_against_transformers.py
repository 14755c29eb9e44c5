"""Soft-capping, sinks and ALiBi mean what they mean in models that have them, by transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention_scoring import Scoring
from tests.kernels.attention_case import COMPILED, TORCH, Case, attend, make_case
from tests.kernels.references import assert_close

HEADS, KV_HEADS, SCALE = 4, 2, 0.3
# One item with its whole context new, and others of a few tokens.
LENGTHS = [(40, 40), (3, 20), (1, 18)]
BACKENDS = pytest.mark.parametrize("backend", [TORCH, COMPILED])


def check(backend: str, case: Case, library: Callable[..., Any], **told: Any) -> None:
    """Compare each item with `library(query, keys, values, mask)`, which gives [1, Q, H, D] in float64.

    Its query is [1, H, Q, D], its keys and values [1, K, L, D], and its mask [1, 1, Q, L], to be added.
    """
    case.scoring = Scoring(SCALE, **told)
    actual = torch.split(attend(case, backend), list(case.batch.query_lens))
    queries = torch.split(case.query, list(case.batch.query_lens))
    for rows, query, keys, values in zip(actual, queries, case.keys, case.values, strict=True):
        hidden = torch.ones(len(query), len(keys)).triu(len(keys) - len(query) + 1).bool()
        mask = torch.zeros(hidden.shape).double().masked_fill(hidden, -torch.inf)[None, None]
        wide = (each.double().transpose(0, 1)[None] for each in (query, keys, values))
        assert_close(rows, library(*wide, mask)[0].double())


@BACKENDS
def test_slopes_of_bloom(backend: str) -> None:
    """The library adds slope * key position: by the softmax the same, and further from zero."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float32)[:, 0, 1].contiguous()

    def library(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        bias = build_alibi_tensor(torch.ones(1, keys.shape[2]), HEADS, torch.float64)
        scores = query @ keys.transpose(2, 3) * SCALE + bias + mask
        return (scores.softmax(-1) @ values).transpose(1, 2)

    case = make_case(LENGTHS, group=1, kv_heads=HEADS)
    check(backend, case, library, alibi_slopes=slopes)
