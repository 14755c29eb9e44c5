"""The part of a model that each rank of a group has, and the collective operations of a group.

Projections into heads and intermediate widths are split by their rows, those back to the hidden width by
their columns: each rank then has a term of a sum. Query heads are split evenly, and key-value heads too; if
there are fewer of these than ranks, each is on several ranks. Embedding and head are split by vocabulary.
Recurrent layers are split by heads or channels. Norms, routers and latents are on every rank. Independent of
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.rms_norm import rms_norm
from workers.models.config import ModelConfig
from workers.models.errors import UnsupportedError
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba1Config, ShortConvConfig

# The maximum of the setting.
_MOST_RANKS = 64


class Group(Protocol):
    """The ranks that run a model together. All ranks must call the methods in the same order."""

    rank: int
    ranks: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, which have one shape; the same bits on all ranks. May mutate `x`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors [R, S], one after the other in the last dimension: [R, ranks * S] on rank 0.

        On the other ranks the result has no meaning.
        """

    def share(self, x: torch.Tensor) -> None:
        """Copy rank 0's tensor to all ranks. Mutates theirs, which have the same shape."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a matrix of a checkpoint that a rank has.

    Attributes:
        shape: [O, I] in the checkpoint.
        rows: The rows, in ranges that are next to each other in the rank's matrix.
        columns: The range of columns.
    """

    shape: tuple[int, int]
    rows: tuple[range, ...]
    columns: range

    @classmethod
    def whole(cls, rows: int, columns: int = 1) -> Slice:
        """All of a matrix, or of a vector."""
        return cls((rows, columns), (range(rows),), range(columns))

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))

    @property
    def covered(self) -> range:
        """The rows from the first to the last one."""
        return range(min(rows.start for rows in self.rows), max(rows.stop for rows in self.rows))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a rank has, or all of it. Its ranges are of the whole model.

    Attributes:
        group: The ranks over which the model is split; None: it is not.
        heads: The query heads.
        kv_heads: The key-value heads.
        kv_copies: The number of ranks that have the same key-value heads.
        vocabulary: The tokens of this rank. The last ranks may have fewer, or none.
        vocabulary_rows: The number of rows of embedding and head on each rank, padding included.
    """

    group: Group | None
    heads: range
    kv_heads: range
    kv_copies: int
    vocabulary: range
    vocabulary_rows: int

    @classmethod
    def of(cls, config: ModelConfig, group: Group | None) -> Shard:
        """The shard of `group.rank`. Raises UnsupportedError; see `check_split`."""
        rank, ranks = _place(group)
        check_split(config, ranks)
        rows = -(-config.vocab_size // ranks)
        first = min(rank * rows, config.vocab_size)
        return cls(
            group,
            heads=_part(config.num_attention_heads, rank, ranks),
            kv_heads=_part_or_copy(config.num_key_value_heads, rank, ranks),
            kv_copies=max(1, ranks // config.num_key_value_heads),
            vocabulary=range(first, min(first + rows, config.vocab_size)),
            vocabulary_rows=rows,
        )

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.ranks

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which adds terms that a sum over the ranks must have only once."""
        return self.group is None or self.group.rank == 0

    def part(self, size: int) -> range:
        """The rank's part of a width that is a multiple of the number of ranks."""
        return _part(size, *_place(self.group))

    def part_or_copy(self, size: int) -> range:
        """The rank's part of `size`, which may be less than the number of ranks and then divides it.

        Then adjacent ranks have the same part.
        """
        return _part_or_copy(size, *_place(self.group))

    def embedded(
        self, token_ids: torch.Tensor, rows_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The embeddings [T, C] of tokens [T]. Each is on one rank.

        `rows_of`: returns new rows [T, C] of the rank's matrix.
        """
        if self.group is None:
            return rows_of(token_ids)
        own = token_ids - self.vocabulary.start  # [T]
        rows = rows_of(own.clamp(0, self.vocabulary_rows - 1))  # [T, C]
        rows.masked_fill_(((own < 0) | (own >= self.vocabulary_rows))[:, None], 0.0)
        return self.group.sum(rows)

    def logits(self, own: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """The logits [R, V] on rank 0, from those of each rank's tokens [R, `vocabulary_rows`]."""
        if self.group is None:
            return own
        if not len(own):
            return own.new_empty(0, vocab_size)
        gathered = self.group.gather(own)
        # Sampling kernels need contiguous rows.
        return gathered if gathered.shape[1] == vocab_size else gathered[:, :vocab_size].contiguous()


def _place(group: Group | None) -> tuple[int, int]:
    """The rank, and the number of ranks."""
    return (0, 1) if group is None else (group.rank, group.ranks)


def _part(size: int, rank: int, ranks: int) -> range:
    width = size // ranks
    return range(rank * width, (rank + 1) * width)


def _part_or_copy(size: int, rank: int, ranks: int) -> range:
    copies = max(1, ranks // size)
    return _part(size, rank // copies, ranks // copies)


def row_parts(sizes: Sequence[int], parts: Sequence[range]) -> tuple[range, ...]:
    """A rank's rows of a matrix of several projections.

    Args:
        sizes: The rows of each projection in the matrix, in order.
        parts: The rank's rows of each projection, relative to its first row.
    """
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        range(first + part.start, first + part.stop) for first, part in zip(starts, parts, strict=False)
    )


def scaled(heads: range, width: int) -> range:
    """The rows of heads of `width` rows each."""
    return range(heads.start * width, heads.stop * width)


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raises UnsupportedError for a model that cannot be split over this many ranks."""
    why = _why_not(config, ranks)
    if why:
        possible = ", ".join(str(other) for other in range(1, _MOST_RANKS + 1) if not _why_not(config, other))
        raise UnsupportedError(f"tensor_parallel = {ranks} {why}: use one of {possible}")


def _why_not(config: ModelConfig, ranks: int) -> str:
    """Why a model cannot be split over this many ranks; "": it can."""
    if ranks > 1 and _is_tiled(config):
        return "must be 1 for a GGUF file with more value heads than key heads, not for its safetensors"
    divided, divided_or_copied = _recurrent_sizes(config)
    if config.attends:
        divided["num_attention_heads"] = config.num_attention_heads
    if any(layer.feed_forward and not layer.sparse for layer in config.layers):
        divided["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        divided["intermediate size of an expert"] = config.experts.intermediate_size
        divided["shared_expert_intermediate_size"] = config.experts.shared_size
    if config.attends and config.latent is None:
        divided_or_copied["num_key_value_heads"] = config.num_key_value_heads
    for name, size in divided.items():
        if size % ranks:
            return f"must divide the model's {name}, which is {size}"
    for name, number in divided_or_copied.items():
        if number % ranks and ranks % number:
            return f"must divide the model's {name}, which is {number}, or be a multiple of it"
    return ""


def _recurrent_sizes(config: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes of recurrent layers that are split over ranks, and those that ranks may share, by name."""
    sizes = config.recurrent
    if isinstance(sizes, ShortConvConfig):
        return {"hidden_size": config.hidden_size}, {}
    if isinstance(sizes, Mamba1Config):
        return {"width of recurrent layers": sizes.inner}, {}
    if isinstance(sizes, GatedDeltaConfig):
        return {"key heads of recurrent layers": sizes.key_heads}, {}
    if sizes is None:
        return {}, {}
    heads, groups = {"heads of recurrent layers": sizes.heads}, {"groups of recurrent layers": sizes.groups}
    # A normalised group must be on one rank, or on all.
    return (heads | groups, {}) if sizes.has_norm and sizes.groups > 1 else (heads, groups)


def _is_tiled(config: ModelConfig) -> bool:
    """Whether the inputs of the output projection are in an order in which a rank's are not adjacent."""
    sizes, is_tiled = config.recurrent, config.gguf_layout and config.family.gguf_tiled
    return is_tiled and isinstance(sizes, GatedDeltaConfig) and sizes.heads > sizes.key_heads


def row_norm_slices(shard: Shard, *widths: int) -> list[Slice]:
    """The rank's parts in a checkpoint of the norms of query and key rows. `widths`: of the parts."""
    _, ranks = _place(shard.group)
    numbers = ((shard.heads, ranks), (shard.kv_heads, ranks // shard.kv_copies))
    return [
        Slice((parts * width, 1), (scaled(heads, width // len(heads)),), range(1))
        for width, (heads, parts) in zip(widths, numbers, strict=False)
    ]


def normalise_rows(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Group | None, eps: float
) -> None:
    """RMSNorm of rows that may be split over ranks, computed as `kernels.rms_norm` does for whole rows.

    Mutates the first tensor of each pair.

    Args:
        pairs: The rows or parts [T, w], and their weights [w].
        group: The ranks that have parts of equal widths; some may have the same part. None: rows are whole.
        eps: See `kernels.rms_norm`.
    """
    if group is None:
        for part, weight in pairs:
            part.copy_(rms_norm(part, weight, eps))
        return
    squares = group.sum(torch.cat([part.float().pow(2).sum(-1, keepdim=True) for part, _ in pairs], dim=1))
    for column, (part, weight) in enumerate(pairs):
        # If several ranks have the same part, both the sum and the width count every copy.
        mean = squares[:, column : column + 1] / (len(weight) * group.ranks)
        unit = part.float() * torch.rsqrt(mean + eps)
        part.copy_(weight * unit.to(weight.dtype))
