"""A layer with a recurrent state and attention that read the same rows, and whose outputs are added."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.models.layers import Attention, Body, ForwardContext
from workers.models.linear import Linear, LoadTarget
from workers.models.recurrent_mixer import RecurrentMixer


class SideBySide:
    """mixer(x) + attention(x). In the last layer attention returns the wanted rows only, the mixer all."""

    def __init__(self, mixer: RecurrentMixer, attention: Attention) -> None:
        """Take ownership of the parts."""
        self.mixer, self.attention = mixer, attention

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        yield from self.mixer.targets(prefix)
        yield from self.attention.targets(prefix)

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """See `Body`."""
        yield from self.mixer.projections()
        yield from self.attention.projections()

    def pack(self) -> None:
        """Pack the filled weights for the matrix library."""
        self.mixer.pack()
        self.attention.pack()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C], or only the wanted rows of it."""
        mixed = self.mixer(x, context)
        if self.attention.is_last:
            mixed = mixed.index_select(0, context.inputs.wanted_rows)
        return mixed.add_(self.attention(x, context))


def parts_of(body: Body) -> tuple[Body, ...]:
    """Those that are side by side, in order; else it alone."""
    return (body.mixer, body.attention) if isinstance(body, SideBySide) else (body,)
