"""The captured graphs of decode steps, and the steps that replay them.

A step is loaded into the buffers, launched, and read. Another one may be launched behind it before it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workers.models.inputs import ForwardInputs
from workers.runners.adjusted_rows import AdjustedRows, Adjustments
from workers.runners.base import device_errors
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.decode_memory import StepTokens
from workers.runners.device_queue import DeviceQueue
from workers.sampling import NothingAllowedError, SamplingRow


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step.

    Attributes:
        replay: Launches it.
        logits: One tensor, the logits [bucket, vocab] that it computes. All graphs write to the same memory.
        experts: For each layer with experts, the ids of those of each row [bucket, E] int64. They are where
            the router writes them, so that they cost nothing if nobody wants them.
    """

    replay: Callable[[], None]
    logits: list[torch.Tensor]
    experts: list[torch.Tensor]


class KeptLogits:
    """The logits of a step whose next one is launched, which overwrites those of the graph."""

    def __init__(self, logits: torch.Tensor, queue: DeviceQueue) -> None:
        """Allocate memory for logits [B, vocab] like these."""
        self._memory, self._queue = torch.empty_like(logits), queue
        self.copied = queue.event()

    def keep(self, graph: Graph, rows: int) -> torch.Tensor:
        """A copy of a graph's logits [R, vocab], R <= B, valid until the next one. The last one was read."""
        kept = self._memory[:rows]
        self._queue.launch(lambda: kept.copy_(graph.logits[0][:rows]))
        self.copied.record()
        return kept


class CapturedGraphs:
    """The graphs, and the memory that they share.

    Attributes:
        in_flight: The step whose tokens are not read yet: the buffers are its.
        adjusted: The rows that are chosen once more. None: `adjust` could not be captured.
        adjust: By bucket, what replays the second graphs.
    """

    def __init__(self, buffers: DecodeBuffers, graphs: Mapping[tuple[int, bool], Graph]) -> None:
        """`graphs`: by bucket, and whether adapters are applied."""
        self.buffers = buffers
        self._graphs = dict(graphs)
        self._buckets = sorted({bucket for bucket, _ in graphs})
        self.kept_logits = KeptLogits(graphs[self._buckets[-1], False].logits[0], buffers.queue)
        self.in_flight: GraphStep | None = None
        self.adjusted: AdjustedRows | None = None
        self.adjust: Mapping[int, Callable[[], None]] = {}

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    @property
    def has_lora(self) -> bool:
        """Whether there are graphs that apply adapters."""
        return (self._buckets[-1], True) in self._graphs

    def add(self, graphs: Mapping[tuple[int, bool], Graph]) -> None:
        self._graphs |= graphs

    def graph(self, rows: int, *, lora: bool = False) -> Graph:
        """The smallest for so many rows, of which there is one."""
        return self._graphs[self._bucket(rows), lora]

    def prepare(self, rows: Sequence[SamplingRow], which: Sequence[int]) -> Adjustments | None:
        """Prepares choosing again for these rows. None: no graph can do that."""
        return None if self.adjusted is None else self.adjusted.prepare(rows, which)

    def load_adjusted(self, needed: Adjustments | None) -> Callable[[], None] | None:
        """Returns what chooses again for rows of the batch in the buffers. None: no row needs it."""
        if needed is None or self.adjusted is None:
            return None
        self.adjusted.load(needed, *self.buffers.tokens)
        return self.adjust[self._bucket(len(needed.which))]


class GraphStep:
    """A decode step that was launched; see `LaunchedStep`."""

    def __init__(
        self,
        captured: CapturedGraphs,
        graph: Graph,
        inputs: ForwardInputs,
        adjust: Callable[[], None] | None,
        *,
        keeps_logits: bool = False,
    ) -> None:
        """Launch it. The buffers are loaded. `adjust`: the second graph."""
        self._captured, self._graph, self._inputs, self.adjust = captured, graph, inputs, adjust
        self._rows = len(inputs.positions)
        self._buffers = buffers = captured.buffers
        self._keeps_logits = keeps_logits
        self._copied_logits: torch.Tensor | None = None
        self._is_last = True
        buffers.queue.launch(graph.replay)
        if adjust is not None:
            buffers.queue.launch(adjust)
        self._tokens: StepTokens = buffers.fetch(self._rows, () if adjust is None else buffers.adjusted)
        captured.in_flight = self

    def is_done(self) -> bool:
        with device_errors():
            return self._tokens.have_arrived()

    def chosen(self) -> torch.Tensor:
        chosen, forbidden = self.read()
        if forbidden is not None:
            raise forbidden
        return chosen

    def read(self) -> tuple[torch.Tensor, NothingAllowedError | None]:
        """As `chosen`, which raises the error: rows without an allowed token."""
        if self._captured.in_flight is self:
            self._captured.in_flight = None
        with device_errors():
            chosen, forbidden = self._tokens.read()
            if self._is_last and forbidden is None:
                self._buffers.advanced(self._inputs, chosen)
            return chosen, forbidden

    @property
    def own_logits(self) -> torch.Tensor:
        """[R, vocab], until the next step is launched."""
        return self._graph.logits[0][: self._rows]

    @property
    def experts(self) -> list[torch.Tensor]:
        """See `Graph`."""
        return self._graph.experts

    @contextmanager
    def logits(self) -> Iterator[torch.Tensor]:
        if self._copied_logits is None:
            assert self._is_last, "they were not kept"
            yield self.own_logits
            return
        with self._buffers.queue.beside(self._captured.kept_logits.copied):
            yield self._copied_logits

    def note_next(self) -> None:
        """Note that another step is launched behind it, which writes to the same memory."""
        self._is_last = False
        if self._keeps_logits:
            self._copied_logits = self._captured.kept_logits.keep(self._graph, self._rows)
