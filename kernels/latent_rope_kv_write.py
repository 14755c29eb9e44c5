"""What latent attention does between its projections and the products by head: norm, rotation and KV write.

A token's latent is RMS-normalised, and the last part of its key is rotated by its position. Both go to the
token's slot, which has nothing else. The last parts of queries are rotated likewise.

Dimension letters: T tokens; H query heads; L width of the latent; R width of what is rotated; N width of what
is not rotated in a query; P pages; S tokens a page; D width of a key in pages, L + R or more.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_same, check_tensor
from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys
from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope_reference


def latent_rope_kv_write(
    rows: torch.Tensor,
    queries: torch.Tensor | None,
    norm: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    pages: torch.Tensor | PackedKeys,
    eps: float,
    *,
    interleaved: bool,
) -> torch.Tensor | None:
    """Write latents and keys to their slots, and rotate queries. Mutates only these slots of `pages`.

    Args:
        rows: [T, L + R], latents and after them what is rotated of keys; float32, bfloat16 or float16; any
            strides but the last, which is 1.
        queries: [T, H, N + R], dtype of rows, heads contiguous. None: only the pages are written.
        norm: [L], dtype of rows.
        cos_sin: [T, R] float32, the rows of `rope_table` at the positions of the tokens. None: no rotation.
        slots: [T] int32 or int64, page * S + offset; negative for a padding token, which is not written.
        pages: [P, S, 1, D] contiguous, of the dtype of rows; or packed, which takes it.
        eps: Added to the mean square; positive.
        interleaved: The two elements of a pair are next to each other; in results they are R / 2 apart.

    Returns:
        New queries [T, H, D]: L elements that are not written, the R rotated ones, and zeros; or None.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError: A slot is beyond the last page (on the CPU).
    """
    check_tensor("rows", rows, (len(slots), None), FLOAT_DTYPES)
    check_tensor("norm", norm, (None,), FLOAT_DTYPES)
    check_same("norm", norm, "rows", rows)
    check_tensor("slots", slots, (None,), INDEX_DTYPES)
    rotated = rows.shape[1] - len(norm)
    if queries is not None:
        check_tensor("queries", queries, (len(rows), None, None), FLOAT_DTYPES)
        check_same("queries", queries, "rows", rows)
    if cos_sin is not None:
        check_tensor("cos_sin", cos_sin, (len(rows), rotated), (torch.float32,))
    if rows.is_cuda:
        from kernels.cuda import latent_rope_kv_write as cuda

        assert isinstance(pages, torch.Tensor)
        return cuda.latent_rope_kv_write(
            rows, queries, norm, cos_sin, slots, pages, eps, interleaved=interleaved
        )
    latent, rotated_key = torch.split(rows, [len(norm), rotated], dim=1)
    key = torch.cat(
        (
            rms_norm(latent.contiguous(), norm, eps),
            _turned(rotated_key[:, None], cos_sin, interleaved=interleaved)[:, 0],
        ),
        dim=1,
    )
    missing = pages.shape[3] - rows.shape[1]  # zeros change no score
    _write(functional.pad(key, (0, missing)), pages, slots)
    if queries is None:
        return None
    turned = _turned(queries[..., -rotated:], cos_sin, interleaved=interleaved)
    return functional.pad(turned, (len(norm), missing))


def _turned(x: torch.Tensor, cos_sin: torch.Tensor | None, *, interleaved: bool) -> torch.Tensor:
    """Rotated by the positions, if at all: [T, H, R] -> [T, H, R]."""
    if cos_sin is None:
        return x
    if interleaved:
        x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
    return apply_rope_reference(x, cos_sin)


def _write(key: torch.Tensor, pages: torch.Tensor | PackedKeys, slots: torch.Tensor) -> None:
    """Write keys [T, D] of the only head to their slots. Mutates `pages`."""
    if isinstance(pages, PackedKeys):
        kv_write(key[:, None], None, pages, None, slots)
        return
    used = slots >= 0
    pages.flatten(0, 1).index_copy_(0, slots[used].long(), key[used][:, None])
