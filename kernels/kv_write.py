"""Writes the keys and values of new tokens into the pages of the KV cache.

Dimension letters: T tokens; P pages; S tokens per page; K key-value heads; D head width.
"""

from __future__ import annotations

import torch

from kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_pages, check_same, check_tensor
from kernels.cpu import kv_write as cpu
from kernels.packed_pages import PackedKeys, PackedValues, Pages


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Scatter in plain torch; see `kv_write`."""
    used = slots >= 0  # [T]
    if not bool(used.all()):
        key, value, slots = key[used], value[used], slots[used]
    # A slot is a row of the concatenated pages.
    slots = slots.long()
    k_pages.flatten(0, 1).index_copy_(0, slots, key)  # [P * S, K, D]
    v_pages.flatten(0, 1).index_copy_(0, slots, value)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    slots: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot.

    Mutates only these slots of `k_pages` and `v_pages`. Two tokens must not have the same slot.

    Args:
        key: [T, K, D]; float32, bfloat16 or float16.
        value: [T, K, D]; dtype of key.
        k_pages: [P, S, K, D] contiguous, or packed; dtype of key.
        v_pages: [P, S, K, D], packed if the keys are; dtype of key.
        slots: [T] int32 or int64, page * S + offset; negative for a padding token, which is not written.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError, RuntimeError: A slot is beyond the last page (on the CPU).
    """
    tokens, heads, width = key.shape
    check_tensor("key", key, (None, None, None), FLOAT_DTYPES)
    check_tensor("value", value, key.shape, FLOAT_DTYPES)
    check_same("value", value, "key", key)
    check_tensor("slots", slots, (tokens,), INDEX_DTYPES)
    check_pages(k_pages, v_pages, heads, width, "key", key)
    if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
        return cpu.kv_write(key, value, k_pages, v_pages, slots)
    assert isinstance(k_pages, torch.Tensor) and isinstance(v_pages, torch.Tensor)
    return kv_write_reference(key, value, k_pages, v_pages, slots)
