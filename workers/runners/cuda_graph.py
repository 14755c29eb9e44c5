"""The decode runner of CUDA devices: one CUDA graph for each size of batch, replayed for every step.

Launching the kernels of a decode step from Python takes longer than running them. A graph holds them all,
from the embedding to the choice of the next tokens, and is launched at once. Everything that differs between
steps (tokens, positions, lengths, pages) is in fixed device memory, owned by `decode_buffers`.

A batch runs in the smallest bucket that holds it; the rows beyond it are padded. Graphs are captured on the
first decode. All else (prefills, mixed batches, verifies, larger batches, steps whose hidden states are read)
runs eagerly with the same kernels, and so does every decode if a capture fails: more slowly, but it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from workers.device_sampling import is_simple
from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.models.model import Model
from workers.models.taps import Taps
from workers.runners.base import DeviceLostError, StepResult, device_errors
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


class CaptureError(Exception):
    """A capture failed, and the device is as it was before. The cause says why."""


class CudaGraphRunner:
    """Replays decode steps; runs everything else eagerly.

    Attributes:
        name: What runs decodes: "cuda_graph", or "eager" once a capture has failed.
    """

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
        self.has_hidden_states = model.has_hidden_states
        self._buckets = buckets_up_to(max_rows)
        max_pages = -(-max_seq_len // kv.page_size)
        self._max_rows, self._max_pages = self._buckets[-1], max_pages
        self.name = "cuda_graph"
        self._capture: Capture | None = capture or _CudaCapture(kv.device)  # None: used
        self._buffers: DecodeBuffers | None = None
        self._graphs: dict[int, _Graph] = {}

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], taps: Taps | None = None
    ) -> StepResult:
        """See `Runner.step`."""
        with device_errors(), torch.inference_mode():
            if taps is None and self._is_decode(inputs, rows):
                if self._capture is not None:
                    self._capture_all(self._capture)
                if self._buffers is not None:
                    return self._replay(self._buffers, inputs, rows)
            return self._eager.step(inputs, rows, taps)

    def _is_decode(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Whether every item appends one token and wants its row, and there is a bucket for that."""
        items = len(inputs.attention.query_lens)
        return (
            len(inputs.token_ids) == items == len(rows) <= self._max_rows
            and max(inputs.attention.query_lens) == 1
            and inputs.attention.trees is None
            and inputs.attention.page_tables.shape[1] <= self._max_pages
        )

    def _replay(
        self, buffers: DecodeBuffers, inputs: ForwardInputs, rows: Sequence[SamplingRow]
    ) -> StepResult:
        count = len(rows)
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
            return choose_tokens(logits, rows)
        return StepResult(logits, chosen)

    def run_ahead(self, steps: int, count: int) -> None:
        """Repeat the last decode step of `count` sequences, each time with the tokens chosen before.

        For measuring what the device alone needs. Launches without waiting. The caller has reserved pages,
        and sent tables that name them, with the step before; nothing here tells it what was chosen.
        """
        assert self._buffers is not None, "no decode step has run, or a capture has failed"
        graph = self._graphs[next(size for size in self._buckets if size >= count)]
        for _ in range(steps):
            graph.replay()
        self._buffers.forget()

    def _capture_all(self, capture: Capture) -> None:
        """Capture the graphs, or give up on them for good: what failed once would fail in every step.

        Raises:
            DeviceLostError: The device did not survive the failure.
        """
        self._capture = None
        try:
            with device_errors():
                self._buffers, self._graphs = self._captured(capture)
            return
        except DeviceLostError:
            raise
        except Exception as error:  # whatever it is: there is another way to run
            reason = _first_line(error.__cause__ if isinstance(error, CaptureError) else error)
        # Only out here does nothing refer to the graphs that were captured before the one that failed.
        if self._kv.device.type == "cuda":
            torch.cuda.empty_cache()
        self.name = EagerRunner.name
        _warn("CUDA graphs could not be captured: decodes are launched one kernel at a time", reason)

    def _captured(self, capture: Capture) -> tuple[DecodeBuffers, dict[int, _Graph]]:
        """A graph for each bucket, the largest first: the others fit into its memory."""
        buffers = DecodeBuffers(self._max_rows, self._max_pages, self._kv.device)
        return buffers, {
            bucket: self._capture_one(capture, buffers, bucket) for bucket in reversed(self._buckets)
        }

    def _capture_one(self, capture: Capture, buffers: DecodeBuffers, bucket: int) -> _Graph:
        # All rows are padded while it is captured and before: no page is read or written.
        buffers.clear()
        made: list[torch.Tensor] = []

        def run() -> None:
            made[:] = [self._decode(buffers, bucket)]

        return _Graph(capture(run), made)

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
        self._stream: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warms up, then captures `run`.

        Raises:
            CaptureError: That failed, and the device can be used as before.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._warm_up(run)
            return self._record(run)
        except Exception as error:
            # A device that is lost says so again, here as in every call that follows.
            torch.cuda.synchronize(self._device)
            raise CaptureError from error

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Kernels are compiled, and libraries take their workspaces, before anything is recorded."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Not `torch.cuda.graph`, which leaves its stream the current one where a capture cannot be ended.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool)
                run()
                graph.capture_end()
            except Exception:
                self._abandon(graph)
                raise
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture, as far as it got. The first error is the one to report."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The stream is free again, but where its end failed the allocator still counts a capture. Where
            # the end got past that, the first of these raises, and the graph releases the pool itself.
            index = self._stream.device_index
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)  # noqa: SLF001
                torch._C._cuda_releasePool(index, self._pool)  # noqa: SLF001


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _warn(event: str, reason: str) -> None:
    """Log, also where there is only what kernels and models need."""
    try:
        import structlog  # noqa: PLC0415
    except ImportError:
        logging.getLogger(__name__).warning("%s: %s", event, reason)
    else:
        structlog.get_logger(__name__).warning(event, reason=reason)
