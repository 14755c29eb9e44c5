"""The decode runner of CUDA devices: one CUDA graph for each size of batch, replayed for every step.

Launching the kernels of a decode step from Python takes longer than running them. A graph holds them all,
from the embedding to the choice of the next tokens, and is launched at once. Everything that differs between
steps (tokens, positions, lengths, pages) is in fixed device memory, owned by `decode_buffers`.

A batch runs in the smallest bucket that holds it; the rows beyond it are padded. Graphs are captured on the
first decode. All else (prefills, mixed batches, verifies, larger batches) runs eagerly with the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.device_sampling import is_simple
from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.runners.base import Model, StepResult, device_errors
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.eager import EagerRunner, choose_tokens
from workers.sampling import SamplingRow

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# Makes a function that repeats the launches of a function given to it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """The sizes that batches of up to `max_rows` are padded to, ascending. Larger than 256 run eagerly."""
    largest = min(max_rows, _BUCKETS[-1])
    return (*(size for size in _BUCKETS if size < largest), largest)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step.

    Attributes:
        replay: Launches it.
        made: One tensor, the logits [bucket, vocab] that it leaves.
    """

    replay: Callable[[], None]
    made: list[torch.Tensor]


class CudaGraphRunner:
    """Replays decode steps; runs everything else eagerly."""

    name = "cuda_graph"

    def __init__(
        self, model: Model, kv: KvTensors, *, max_rows: int, max_seq_len: int, capture: Capture | None = None
    ) -> None:
        """Prepare to capture.

        Args:
            model: Whose parameters and `kv` never move.
            kv: The pages.
            max_rows: Of a decode step that is captured; see `buckets_up_to`.
            max_seq_len: The longest sequence, in tokens.
            capture: Instead of a CUDA graph, for tests without a GPU.
        """
        self._model, self._kv = model, kv
        self._eager = EagerRunner(model, kv)
        self._buckets = buckets_up_to(max_rows)
        max_pages = -(-max_seq_len // kv.page_size)
        self._max_rows, self._max_pages = self._buckets[-1], max_pages
        self._capture = capture or _CudaCapture(kv.device)
        self._buffers: DecodeBuffers | None = None
        self._graphs: dict[int, _Graph] = {}

    def step(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> StepResult:
        """See `Runner.step`."""
        with device_errors(), torch.inference_mode():
            if not self._is_decode(inputs, rows):
                return self._eager.step(inputs, rows)
            return self._replay(inputs, rows)

    def _is_decode(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Whether every item appends one token and wants its row, and there is a bucket for that."""
        items = len(inputs.attention.query_lens)
        return (
            len(inputs.token_ids) == items == len(rows) <= self._max_rows
            and max(inputs.attention.query_lens) == 1
            and inputs.attention.page_tables.shape[1] <= self._max_pages
        )

    def _replay(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> StepResult:
        buffers, count = self._buffers or self._capture_all(), len(rows)
        bucket = next(size for size in self._buckets if size >= count)
        buffers.load(inputs, rows)
        self._graphs[bucket].replay()
        logits = self._graphs[bucket].made[0][:count]
        chosen = buffers.read(count)
        if all(is_simple(row) for row in rows):
            buffers.moved_on(inputs, chosen)
        else:
            # The graph has chosen greedily for rows with masks, penalties or cuts: those settings are applied
            # to its logits, and the device has gone on with the wrong tokens.
            buffers.forget()
            chosen = choose_tokens(logits, rows)
        return StepResult(logits, chosen)

    def run_ahead(self, steps: int, count: int) -> None:
        """Repeat the last decode step of `count` sequences, each time with the tokens chosen before.

        For measuring what the device alone needs. Launches without waiting. The caller has reserved pages,
        and sent tables that name them, with the step before; nothing here tells it what was chosen.
        """
        assert self._buffers is not None, "no decode step has run"
        graph = self._graphs[next(size for size in self._buckets if size >= count)]
        for _ in range(steps):
            graph.replay()
        self._buffers.forget()

    def _capture_all(self) -> DecodeBuffers:
        """Capture a graph for each bucket, the largest first: the others fit into its memory.

        All or none: after a failure the next decode tries again.
        """
        buffers = DecodeBuffers(self._max_rows, self._max_pages, self._kv.device)
        graphs = {bucket: self._capture_one(buffers, bucket) for bucket in reversed(self._buckets)}
        self._buffers, self._graphs = buffers, graphs
        return buffers

    def _capture_one(self, buffers: DecodeBuffers, bucket: int) -> _Graph:
        # All rows are padded while it is captured and before: no page is read or written.
        buffers.clear()
        made: list[torch.Tensor] = []

        def run() -> None:
            made[:] = [self._decode(buffers, bucket)]

        return _Graph(self._capture(run), made)

    def _decode(self, buffers: DecodeBuffers, bucket: int) -> torch.Tensor:
        """One step over the first `bucket` rows of the buffers. Returns the logits [bucket, vocab]."""
        # Where there is no GPU, nothing needs triton.
        from kernels.cuda import advance, sampling  # noqa: PLC0415

        inputs = buffers.inputs(bucket)
        hidden = self._model.forward(inputs, self._kv)  # [bucket, hidden]
        logits = self._model.logits(hidden)  # [bucket, vocab]
        chosen = buffers.chosen[:bucket]
        sampling.choose(logits, *buffers.draws(bucket), chosen, buffers.best[:bucket])
        advance.advance(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.attention.context_lens,
            chosen,
            inputs.attention.page_tables,
            page_size=self._kv.page_size,
        )
        return logits


class _CudaCapture:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all: libraries keep a workspace for each stream they have seen.
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warms up, then captures `run`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Kernels are compiled, and libraries take their workspaces, before anything is recorded.
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            run()
        self._pool = self._pool or graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay
