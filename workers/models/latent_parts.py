"""`kv_b_proj`, the projection of latents to keys and values, in two parts as in newer GGUF files and MLX.

Dimension letters: H heads; N the part of a key that is not rotated; V width of a value; L width of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernels.dequantise import dequantised
from kernels.gguf_blocks import parts_of
from kernels.group_formats import FORMATS
from workers.models.checkpoint import Staging, StoredTensor
from workers.models.errors import ModelError

# Names of the parts, instead of `kv_b_proj`.
PARTS_OF_LATENTS = ("k_b", "v_b")
_DIMENSIONS = 3
_MERGED = "kv_b_proj.weight"


class LatentParts(StoredTensor):
    """`kv_b_proj` [H * (N + V), L], made of its keys [H, L, N], which are transposed, and values [H, V, L].

    Quantised parts are dequantised, because native code splits them by head, and does not quantise them.
    """

    dtype = "F32"

    def __init__(self, keys: StoredTensor, values: StoredTensor) -> None:
        """Raises ModelError if the parts differ in heads or latents."""
        if len(keys.shape) != _DIMENSIONS or len(values.shape) != _DIMENSIONS:
            raise ModelError(f"{keys.file}: tensors {keys.name} and {values.name} must have 3 dimensions")
        (heads, latent, plain), (others, value, width) = keys.shape, values.shape
        if (heads, latent) != (others, width) or 0 in (*keys.shape, *values.shape):
            shapes = f"{list(keys.shape)} and {list(values.shape)}"
            raise ModelError(f"{keys.file}: tensors {keys.name} and {values.name} do not fit: {shapes}")
        self.name, self.file, self.shape = keys.name, keys.file, (heads * (plain + value), latent)
        self.begin, self.nbytes = keys.begin, heads * (plain + value) * latent * 4
        self._keys, self._values = keys, values

    def parts(
        self,
        rows: range | None = None,
        staging: Staging | None = None,  # noqa: ARG002 - as in the interface
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `StoredTensor`. Yields one head after the other. `rows` must be those of whole heads.

        Parts always have their own memory, so copies to a GPU are synchronous.
        """
        of_head = self.shape[0] // self._keys.shape[0]
        rows = range(self.shape[0]) if rows is None else rows
        for head in range(rows.start // of_head, rows.stop // of_head):
            keys, values = (_of_head(part, head) for part in (self._keys, self._values))
            yield head * of_head, torch.cat([keys.t(), values])

    def samples(self) -> Iterator[bytes]:
        for part in (self._keys, self._values):
            yield f"{part.dtype} {part.shape}\n".encode()
            yield from part.samples()


def with_merged_latents(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a model, with `kv_b_proj` in place of its parts. Raises ModelError."""
    merged = dict(found)
    keys, values = (f".self_attn.{part}.weight" for part in PARTS_OF_LATENTS)
    for name in found:
        layer = name.removesuffix(keys)
        if layer != name and f"{layer}{values}" in found:
            parts = merged.pop(name), merged.pop(f"{layer}{values}")
            merged[f"{layer}.self_attn.{_MERGED}"] = LatentParts(*parts)
    return merged


def _of_head(tensor: StoredTensor, head: int) -> torch.Tensor:
    """[H, O, I] -> [O, I] float32. Raises ModelError."""
    _, outputs, inputs = tensor.shape
    raw = torch.cat(
        [part.clone() for _, part in tensor.parts(range(head, head + 1)) if isinstance(part, torch.Tensor)]
    )
    if tensor.dtype not in FORMATS:
        return raw.view(outputs, inputs).float()
    parts = parts_of(tensor.dtype, raw.view(outputs, -1), inputs)
    return dequantised(FORMATS[tensor.dtype], parts)[:, :inputs]
