"""Adapters of a model: low-rank additions to its projections, several of them in one forward.

A model has slots, and a forward the slot of each row (`ForwardInputs.lora_slots`). Does not read files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kernels.lora_pairs import LoraPairs
from workers import huge_pages
from workers.models.errors import UnsupportedError
from workers.models.linear import Linear

_REFUSAL = "adapters need a model that native code runs"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """An adapted projection: y += (x A^T) B^T.

    Attributes:
        a: [r, I], on the CPU, in float32 or the model's dtype.
        b: [O, r], likewise. It includes the adapter's scale, multiplied in float32.
    """

    a: torch.Tensor
    b: torch.Tensor


# By the name of a module in the checkpoint, such as "model.layers.0.self_attn.q_proj".
LoraWeights = Mapping[str, LoraPair]


@dataclass(frozen=True, slots=True)
class PackedLora:
    """An adapter in a model's dtype and layout.

    Attributes:
        projections: What it adds to each projection of the model, in their order; None: nothing.
        bytes: Its memory.
        steering: [L, C] what it adds behind each layer; None: nothing.
    """

    projections: tuple[LoraPairs | None, ...]
    bytes: int
    steering: torch.Tensor | None = None


def pack_lora(
    weights: LoraWeights,
    projections: Sequence[tuple[str, Linear]],
    max_rank: int,
    dtype: torch.dtype,
    *,
    pack: bool,
) -> PackedLora:
    """Convert an adapter for a model, of which only shapes are read.

    Args:
        weights: The adapter. Not modified, and not used afterwards.
        projections: Those of the model, with what the names of their modules begin with.
        max_rank: The largest rank that the model takes.
        dtype: That of the model.
        pack: The model is on the CPU, so packed matrices are faster, if there are kernels.

    Raises:
        ValueError: A module is not there, or a matrix does not fit; the message names the module.
    """
    left, found = dict(weights), list[LoraPairs | None]()
    for prefix, linear in projections:
        pairs = {prefix + name: left.pop(prefix + name, None) for name in linear.parts}
        present = {name: pair for name, pair in pairs.items() if pair is not None}
        for name, pair in present.items():
            if len(pair.a) > max_rank:
                raise ValueError(f"{name}: a rank may be up to {max_rank}, got {len(pair.a)}")
        try:
            found.append(_pairs_of(linear, list(pairs.values()), dtype, pack) if present else None)
        except ValueError as error:
            raise ValueError(f"{' or '.join(present)}: {error}") from error
    if left:
        raise ValueError(f"{min(left)}: the model has no such projection")
    return PackedLora(tuple(found), _keep_together([pairs for pairs in found if pairs is not None], dtype))


def _pairs_of(linear: Linear, pairs: Sequence[LoraPair | None], dtype: torch.dtype, pack: bool) -> LoraPairs:
    given = [
        None if pair is None else _taken(pair, linear, name)
        for name, pair in zip(linear.parts, pairs, strict=True)
    ]
    return LoraPairs(given, linear.weight.shape[1], [*linear.parts.values()], dtype, pack=pack)


def _taken(pair: LoraPair, linear: Linear, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B for the part of a projection that a rank has: terms of A's sum, or rows of B."""
    taken = linear.taken[name]
    (outputs, inputs), rank = taken.shape, len(pair.a)
    if pair.a.shape != (rank, inputs) or pair.b.shape != (outputs, rank):
        raise ValueError(
            f"A and B must have the shapes {[rank, inputs]} and {[outputs, rank]},"
            f" got {[*pair.a.shape]} and {[*pair.b.shape]}"
        )
    rows = [pair.b[own.start : own.stop] for own in taken.rows]
    columns = [pair.a[:, own.start : own.stop] for own in linear.inputs or (taken.columns,)]
    return torch.cat(columns, dim=1), torch.cat(rows)


def _keep_together(pairs: Sequence[LoraPairs], dtype: torch.dtype) -> int:
    """Move matrices next to each other, in the order in which steps read them.

    Returns:
        The bytes of all matrices.
    """
    weights = [weight for each in pairs for weight in each.weights()]
    sizes = [weight.data.numel() for weight in weights]
    memory = huge_pages.empty((sum(sizes),), dtype, "cpu")
    for weight, part in zip(weights, torch.split(memory, sizes), strict=True):
        weight.data = part.view_as(weight.data).copy_(weight.data)
    return memory.nbytes


@dataclass(frozen=True, slots=True)
class BaseMatrix:
    """A matrix of a model that adapters may repeat: its shape, and some of its rows as [n, width]."""

    shape: tuple[int, int]
    rows: Callable[[range], torch.Tensor]


class WithoutLora:
    """The part of `workers.models.model.Model` that is about adapters, in a model that takes none."""

    max_lora_slots = 0
    steering_shape: tuple[int, int] | None = None

    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """None."""
        return {}

    def base_matrices(self) -> dict[str, BaseMatrix]:
        """None."""
        return {}

    def lora_slot_bytes(self, max_rank: int) -> int:  # noqa: ARG002 - as in the interface
        """None."""
        return 0

    # Their arguments are those of the interface.
    def allocate_lora(self, slots: int, max_rank: int) -> None:  # noqa: ARG002
        """Raise UnsupportedError."""
        raise UnsupportedError(_REFUSAL)

    def pack_lora(
        self,
        weights: LoraWeights,  # noqa: ARG002
        steering: Mapping[int, torch.Tensor] = MappingProxyType({}),  # noqa: ARG002
    ) -> PackedLora:
        """Raise UnsupportedError."""
        raise UnsupportedError(_REFUSAL)

    def set_lora(self, slot: int, packed: PackedLora | None) -> None:  # noqa: ARG002
        """Raise UnsupportedError."""
        raise UnsupportedError(_REFUSAL)
