"""Adapters of a model: low-rank additions to its projections, several of them in one forward.

A model has slots for adapters, and a forward has the slot of each row (`ForwardInputs.lora_slots`). Does not
read files.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kernels.expert_lora import ExpertPairs, ExpertTable
from kernels.lora_pairs import LoraPairs
from workers import huge_pages
from workers.models.linear import Linear
from workers.models.shard import Slice

# The number of rows whose norms are computed at a time.
_NORMED_ROWS = 1024
# The most modules of a projection that a message names.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class LoraPair:
    """An adapted projection: y += (x A^T) B^T.

    Attributes:
        a: [r, I], on the CPU, in float32 or the model's dtype.
        b: [O, r], the same. It includes the adapter's scale, multiplied in float32.
        magnitude: [O], the same: the norm that each row of W + B A is scaled to (DoRA); None: not scaled.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter of the library that PEFT adapts, such as one with the matrices of all experts.

    Attributes:
        modules: For each matrix, the names in the checkpoint of the modules whose outputs it has.
        interleaved: Whether their outputs alternate.
    """

    modules: tuple[tuple[str, ...], ...]
    interleaved: bool = False


class ExpertProjection:
    """A projection of all experts of a layer, for adapters only: see `Linear`.

    Attributes:
        lora: The slots of adapters; None: the model takes none.
    """

    def __init__(
        self, name: str, taken: Mapping[str, Slice], count: int, inputs: int, *, interleaved: bool
    ) -> None:
        """Describe a projection.

        Args:
            name: The library's parameter, in a layer.
            taken: This rank's part of each module, by its name, in which {} stands for the expert.
            count: The number of experts.
            inputs: The number of inputs that this rank has.
            interleaved: See `ExpertStack`.
        """
        self.name = name
        self.lora: ExpertTable | None = None
        self._taken, self._count, self._inputs, self._interleaved = taken, count, inputs, interleaved

    @property
    def parts(self) -> list[str]:
        """The modules of all experts, ordered by expert."""
        return [name.format(expert) for expert in range(self._count) for name in self._taken]

    def modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The numbers of outputs and inputs of each module in the checkpoint, by its name."""
        shapes = [taken.shape for taken in self._taken.values()] * self._count
        yield from zip(self.parts, shapes, strict=True)

    def stack(self, prefix: str) -> ExpertStack:
        """The parameter through which PEFT adapts these projections."""
        parts, width = [prefix + name for name in self.parts], len(self._taken)
        experts = (tuple(parts[at : at + width]) for at in range(0, len(parts), width))
        return ExpertStack(tuple(experts), self._interleaved and width > 1)

    def lora_slot_bytes(self, max_rank: int) -> int:  # noqa: ARG002 - as in `Linear`
        """0: on a GPU experts take no adapters."""
        return 0

    def allocate_lora(self, slots: int, max_rank: int) -> None:  # noqa: ARG002 - as in `Linear`
        """Make empty slots for adapters; without slots, give the memory back."""
        outputs = [taken.num_rows for taken in self._taken.values()]
        self.lora = ExpertTable(slots, self._inputs, outputs) if slots else None

    def pairs_of(self, pairs: Sequence[LoraPair | None], dtype: torch.dtype) -> ExpertPairs:
        """The LoRA pairs of an adapter for `parts`."""
        experts, width = list[LoraPairs | None](), len(self._taken)
        outputs = [taken.num_rows for taken in self._taken.values()]
        for at in range(0, len(pairs), width):
            own = [
                None if pair is None else _part_of(pair, taken)
                for pair, taken in zip(pairs[at : at + width], self._taken.values(), strict=True)
            ]
            some = any(pair is not None for pair in own)
            experts.append(LoraPairs(own, self._inputs, outputs, dtype, pack=True) if some else None)
        return ExpertPairs(experts)


Projection = Linear | ExpertProjection

# Pairs by the name of a module in the checkpoint, such as "model.layers.0.self_attn.q_proj".
LoraWeights = Mapping[str, LoraPair]


@dataclass(frozen=True, slots=True)
class PackedLora:
    """An adapter in a model's dtype and layout.

    Attributes:
        projections: The matrices for each projection of the model, in their order; None: not adapted.
        bytes: Its memory in bytes.
        steering: [L, C], the vectors added after each layer; None: it has none.
        made_for: The model whose weights it depends on (DoRA); None: it does not depend on weights.
    """

    projections: tuple[LoraPairs | ExpertPairs | None, ...]
    bytes: int
    steering: torch.Tensor | None = None
    made_for: weakref.ref[object] | None = None


def pack_lora(
    weights: LoraWeights,
    projections: Sequence[tuple[str, Projection]],
    max_rank: int,
    dtype: torch.dtype,
    *,
    pack: bool,
) -> PackedLora:
    """Convert an adapter for a model. Reads the model's weights only for DoRA.

    Args:
        weights: The adapter. Not modified, and not used afterwards.
        projections: The projections of the model, each with the prefix of its modules' names.
        max_rank: The largest rank that the model takes.
        dtype: The dtype of the model.
        pack: Pack matrices for the CPU's kernels, if there are any for them.

    Raises:
        ValueError: A module does not exist, or a matrix does not fit; the message names the module.
    """
    left, found = dict(weights), list[LoraPairs | ExpertPairs | None]()
    for prefix, projection in projections:
        pairs = {prefix + name: left.pop(prefix + name, None) for name in projection.parts}
        present = {name: pair for name, pair in pairs.items() if pair is not None}
        for name, pair in present.items():
            if len(pair.a) > max_rank:
                raise ValueError(f"{name}: a rank may be up to {max_rank}, got {len(pair.a)}")
        try:
            found.append(_pairs_of(projection, list(pairs.values()), dtype, pack) if present else None)
        except ValueError as error:
            raise ValueError(f"{' or '.join([*present][:_MOST_NAMED])}: {error}") from error
    if left:
        raise ValueError(f"{min(left)}: the model has no such projection")
    size = _keep_together([pairs for pairs in found if pairs is not None])
    for pairs_of_experts in found:
        if isinstance(pairs_of_experts, ExpertPairs):
            pairs_of_experts.settle()
    return PackedLora(tuple(found), size)


def _pairs_of(
    linear: Projection, pairs: Sequence[LoraPair | None], dtype: torch.dtype, pack: bool
) -> LoraPairs | ExpertPairs:
    if isinstance(linear, ExpertProjection):
        return linear.pairs_of(pairs, dtype)
    given = [
        None if pair is None else _part_of(pair, linear.taken[name], linear.inputs)
        for name, pair in zip(linear.parts, pairs, strict=True)
    ]
    scales = shifts = None
    if any(pair is not None and pair.magnitude is not None for pair in pairs):
        scales = _scales(linear, pairs, given)
        # The projection's output includes the bias, which must not be scaled.
        shifts = None if linear.bias is None else linear.bias.float() * (1 - scales)
    outputs, weight = [*linear.parts.values()], linear.weight
    # The weight's dtype: routers may be float32 in a model of another dtype.
    return LoraPairs(given, weight.shape[1], outputs, weight.dtype, pack=pack, scales=scales, shifts=shifts)


@torch.inference_mode()
def _scales(
    linear: Linear,
    pairs: Sequence[LoraPair | None],
    given: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
) -> torch.Tensor:
    """[O] float32: the magnitude divided by the norm of each row of W + B A; 1 without a magnitude."""
    scales, end = torch.ones(len(linear.weight)), 0
    for taken, pair, own in zip(linear.taken.values(), pairs, given, strict=True):
        begin, end = end, end + taken.num_rows
        if pair is None or own is None or pair.magnitude is None:
            continue
        a, b = (matrix.float() for matrix in own)
        scales[begin:end] = torch.cat([pair.magnitude[rows.start : rows.stop] for rows in taken.rows])
        for first in range(begin, end, _NORMED_ROWS):
            rows = torch.arange(first, min(first + _NORMED_ROWS, end))
            changed = linear.weight.rows(rows).float() + b[rows - begin] @ a
            scales[rows] /= torch.linalg.vector_norm(changed, dim=1)
    if not scales.isfinite().all():
        raise ValueError("a row of W + B A is 0, which has no direction")
    return scales


def _part_of(pair: LoraPair, taken: Slice, inputs: Sequence[range] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B for a rank's part of a projection: columns of A, or rows of B."""
    (outputs, all_inputs), rank = taken.shape, len(pair.a)
    if pair.a.shape != (rank, all_inputs) or pair.b.shape != (outputs, rank):
        raise ValueError(
            f"A and B must have the shapes {[rank, all_inputs]} and {[outputs, rank]},"
            f" got {[*pair.a.shape]} and {[*pair.b.shape]}"
        )
    b = torch.cat([pair.b[own.start : own.stop] for own in taken.rows])
    columns = inputs or (taken.columns,)
    # Not a copy: kernels recognise an A that several parts share.
    if [*columns] == [range(all_inputs)]:
        return pair.a, b
    return torch.cat([pair.a[:, own.start : own.stop] for own in columns], dim=1), b


def _keep_together(pairs: Sequence[LoraPairs | ExpertPairs]) -> int:
    """Move matrices next to each other in the order in which steps read them, separately by dtype.

    Returns:
        The size of all matrices in bytes.
    """
    every, total = [weight for each in pairs for weight in each.weights()], 0
    for dtype in {weight.dtype for weight in every}:
        weights = [weight for weight in every if weight.dtype == dtype]
        sizes = [weight.data.numel() for weight in weights]
        memory = huge_pages.empty((sum(sizes),), dtype, "cpu")
        for weight, part in zip(weights, torch.split(memory, sizes), strict=True):
            weight.data = part.view_as(weight.data).copy_(weight.data)
        total += memory.nbytes
    return total


@dataclass(frozen=True, slots=True)
class BaseMatrix:
    """A matrix of a model that adapters may contain: its shape, and a reader of rows as [n, width]."""

    shape: tuple[int, int]
    rows: Callable[[range], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Adaptable:
    """The modules and layers that adapters of a model may change.

    Attributes:
        modules: The numbers of outputs and inputs of each module that may be adapted, by its name.
        stacks: The modules that PEFT may adapt together, by the name of the library's parameter.
        base: The matrices of the model that an adapter may contain a copy of, by the names of their tensors.
        steering_shape: [layers, hidden size] of steering vectors; None: not supported.
        takes_dora: Whether DoRA is supported.
    """

    modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict)
    base: Mapping[str, BaseMatrix] = field(default_factory=dict)
    steering_shape: tuple[int, int] | None = None
    takes_dora: bool = False
