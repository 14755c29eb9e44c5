"""The decode runner of CUDA devices: one CUDA graph for each batch size, replayed in every step.

Launching the kernels of a decode step from Python takes longer than running them. A graph contains them all,
from the embedding to the choice of the next tokens, and takes one launch. Everything that differs between
steps (tokens, positions, lengths, pages) is in fixed device memory, owned by `decode_buffers`.

A batch runs in the smallest bucket that it fits, and the other rows are padded. Graphs are captured on the
first decode: for each size one; when the model has slots for adapters, one that only batches with adapters
replay. Rows with a mask, biases, penalties, top_k, top_p or min_p are chosen once more, by a short second
graph (`adjusted_rows`). Other steps (prefills, mixed batches, verifies, larger batches, captured hidden
states, given experts) run eagerly with the same kernels. So do decodes, more slowly, if a capture fails. With
graphs switched off, the kernels of a decode are launched one by one, over the same memory and as far ahead.

Of decodes whose callers continue with the chosen tokens, the next step can be launched while one runs
(`launch`), with other rows whose tokens the host has: so the device does not wait for the host between them.
Until the tokens of the last launched step are read, its buffers are taken: other steps run eagerly then,
behind it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from workers.device_sampling import ROWS_AT_ONCE
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.model import Model
from workers.runners.adjusted_rows import AdjustedRows, Adjustments, adjusted_among
from workers.runners.base import After, DeviceLostError, StepResult, device_errors
from workers.runners.decode_buffers import DecodeBuffers, StepTokens
from workers.runners.device_queue import DeviceQueue
from workers.runners.eager import EagerRunner, choose_tokens
from workers.sampling import NothingAllowedError, SamplingRow

_log = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# Captures the launches of a function, and returns a function that repeats them.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """The sizes that batches of up to `max_rows` are padded to, ascending. Larger than 256 run eagerly."""
    largest = min(max_rows, _BUCKETS[-1])
    return (*(size for size in _BUCKETS if size < largest), largest)


def launch_each(run: Callable[[], None]) -> Callable[[], None]:
    """In place of a capture: repeats the launches themselves. The first ones compile what they need."""
    run()
    return run


@dataclass(frozen=True, slots=True)
class _Graph:
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

    def keep(self, graph: _Graph, rows: int) -> torch.Tensor:
        """A copy of a graph's logits [R, vocab], R <= B, valid until the next one. The last one was read."""
        kept = self._memory[:rows]
        self._queue.launch(lambda: kept.copy_(graph.logits[0][:rows]))
        self.copied.record()
        return kept


class _Captured:
    """The graphs, and the memory that they share.

    Attributes:
        in_flight: The step whose tokens are not read yet: the buffers are its.
        adjusted: The rows that are chosen once more. None: `adjust` could not be captured.
        adjust: By bucket, what replays the second graphs.
    """

    def __init__(self, buffers: DecodeBuffers, graphs: Mapping[tuple[int, bool], _Graph]) -> None:
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

    def add(self, graphs: Mapping[tuple[int, bool], _Graph]) -> None:
        """Adds graphs of the same buckets."""
        self._graphs |= graphs

    def graph(self, rows: int, *, lora: bool = False) -> _Graph:
        """The smallest for so many rows, of which there is one."""
        return self._graphs[self._bucket(rows), lora]

    def prepare(self, rows: Sequence[SamplingRow], which: Sequence[int]) -> Adjustments | None:
        """What is needed to choose once more for these rows. None: no graph can."""
        return None if self.adjusted is None else self.adjusted.prepare(rows, which)

    def load_adjusted(self, needed: Adjustments | None) -> Callable[[], None] | None:
        """What chooses once more for rows of the batch that the buffers have. None: nothing has to."""
        if needed is None or self.adjusted is None:
            return None
        self.adjusted.load(needed, *self.buffers.tokens)
        return self.adjust[self._bucket(len(needed.which))]


class GraphStep:
    """A decode step that was launched; see `LaunchedStep`."""

    def __init__(
        self,
        captured: _Captured,
        graph: _Graph,
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
        """See `LaunchedStep`."""
        with device_errors():
            return self._tokens.have_arrived()

    def chosen(self) -> torch.Tensor:
        """See `LaunchedStep`."""
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
        """See `_Graph`."""
        return self._graph.experts

    @contextmanager
    def logits(self) -> Iterator[torch.Tensor]:
        """See `LaunchedStep`."""
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


def _announce_to_nobody() -> None:
    pass


class CaptureError(Exception):
    """A capture failed, and the device still works. The cause is the reason."""


class CudaGraphRunner:
    """Replays decode steps; runs everything else eagerly.

    Attributes:
        name: How decodes run: "cuda_graph", or "eager" without graphs or after a failed capture.
        can_launch: See `Runner.can_launch`. False after a failed capture.
    """

    def __init__(
        self,
        model: Model,
        kv: KvTensors,
        *,
        max_rows: int,
        max_seq_len: int,
        graphs: bool = True,
        capture: Capture | None = None,
        queue: DeviceQueue | None = None,
        share: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Prepare to capture.

        Args:
            model: Its parameters, like `kv`, must not move.
            kv: The pages.
            max_rows: The most rows of a captured decode step; see `buckets_up_to`.
            max_seq_len: The longest sequence, in tokens.
            graphs: False: the kernels of a decode are launched one by one.
            capture, queue: Replace CUDA graphs, and the device's queue, in tests without a GPU.
            share: See `DecodeBuffers`.
        """
        self._model, self._kv = model, kv
        self._eager = EagerRunner(model, kv)
        self.has_hidden_states = model.has_hidden_states
        self._buckets = buckets_up_to(max_rows)
        max_pages = -(-max_seq_len // kv.page_size)
        self._max_rows, self._max_pages = self._buckets[-1], max_pages
        self.name = "cuda_graph" if graphs else EagerRunner.name
        self.can_launch = True
        # None after the first use.
        self._capture: Capture | None = capture or (_CudaCapture(kv.device) if graphs else launch_each)
        # The same, for the graphs that are captured when the model has slots for adapters.
        self._lora_capture: Capture | None = self._capture
        self._queue, self._share = queue, share
        self._captured: _Captured | None = None
        self._last: _Graph | None = None

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        """See `Runner.step`."""
        with device_errors(), torch.inference_mode():
            captured = None if capture is not None and capture.rows else self._captured_for(inputs, rows)
            if captured is None:
                return self._eager.step(inputs, rows, capture)
            buffers = captured.buffers
            buffers.load(inputs, rows)
            needed = captured.prepare(rows, buffers.adjusted) if buffers.adjusted else None
            adjust = captured.load_adjusted(needed)
            step = GraphStep(captured, self._graph(captured, inputs), inputs, adjust)
            is_adjusted = adjust is not None or not buffers.adjusted
            return self._result(buffers, step, rows, capture, is_adjusted=is_adjusted)

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        *,
        keeps_logits: bool = False,
        after: After | None = None,
        announce: Callable[[], None] = _announce_to_nobody,
    ) -> GraphStep | None:
        """See `Runner.launch`.

        `announce`: called before the first launch that the other ranks of a group have to repeat.
        """
        with device_errors(), torch.inference_mode():
            if after is not None and after.places is None:
                return self._repeat(after, inputs, announce, keeps_logits=keeps_logits)
            captured = (
                self._captured_for(inputs, rows) if after is None else self._captured_after(inputs, rows)
            )
            if captured is None:
                return None
            which = adjusted_among(rows)
            needed = captured.prepare(rows, which) if which else None
            if which and needed is None:
                return None
            announce()
            if after is None:
                captured.buffers.load(inputs, rows)
            else:
                _step_of(after).note_next()
                captured.buffers.load_after(inputs, rows, after.places)
            adjust = captured.load_adjusted(needed)
            return GraphStep(
                captured, self._graph(captured, inputs), inputs, adjust, keeps_logits=keeps_logits
            )

    def _repeat(
        self, after: After, inputs: ForwardInputs, announce: Callable[[], None], *, keeps_logits: bool
    ) -> GraphStep:
        """Launch a step of the rows of the one before it, which are chosen as before."""
        captured, before = self._captured, _step_of(after)
        assert captured is not None, "it has launched the step before"
        announce()
        before.note_next()
        captured.buffers.load_after(inputs, (), None)
        return GraphStep(
            captured, self._graph(captured, inputs), inputs, before.adjust, keeps_logits=keeps_logits
        )

    @property
    def is_in_flight(self) -> bool:
        """Whether the tokens of a launched step are not read yet, so that others run eagerly."""
        return self._captured is not None and self._captured.in_flight is not None

    @property
    def has_to_capture(self) -> bool:
        """Whether the next decode captures the graphs."""
        return self._capture is not None

    def _captured_after(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> _Captured | None:
        """The graphs, if one of them computes this step behind the one in flight."""
        fits = self._is_decode(inputs, rows) and inputs.lora_slots is None
        return self._captured if fits else None

    def _captured_for(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> _Captured | None:
        """The graphs, if one of them computes this step."""
        if not self._is_decode(inputs, rows):
            return None
        if self._capture is not None:
            self._capture_all(self._capture)
        captured = self._captured
        if captured is None or captured.in_flight is not None:
            return None
        return None if inputs.lora_slots is not None and not captured.has_lora else captured

    def _graph(self, captured: _Captured, inputs: ForwardInputs) -> _Graph:
        """The graph of a step that is loaded."""
        self._last = captured.graph(len(inputs.positions), lora=inputs.lora_slots is not None)
        return self._last

    def _is_decode(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Whether every item appends one token and wants its row, and there is a bucket for that."""
        items = len(inputs.attention.query_lens)
        return (
            inputs.token_ids.shape[0] == items == len(rows) <= self._max_rows
            and max(inputs.attention.query_lens) == 1
            and inputs.attention.trees is None
            and inputs.experts is None
            and inputs.attention.page_tables.shape[1] <= self._max_pages
        )

    def _result(
        self,
        buffers: DecodeBuffers,
        step: GraphStep,
        rows: Sequence[SamplingRow],
        capture: RowCapture | None,
        *,
        is_adjusted: bool,
    ) -> StepResult:
        chosen, forbidden = step.read()
        if capture is not None and step.experts:
            index = torch.tensor(capture.expert_rows, device=step.own_logits.device)  # [K]
            capture.experts = [*torch.stack(step.experts).index_select(1, index)]
        if not is_adjusted:
            # The tokens in the device's buffers are not those of the adjusted rows.
            buffers.invalidate()
            return choose_tokens(step.own_logits, rows)
        failed = {} if forbidden is None else dict.fromkeys(forbidden.rows, forbidden)
        return StepResult(step.own_logits, chosen, failed)

    def replay_last(self, steps: int) -> None:
        """Repeat the last decode step, each time with the tokens chosen before.

        Measures the time of the device alone. Does not wait for the device or return tokens. The page tables
        of the step before must include pages for the new tokens.
        """
        assert self._captured is not None and self._last is not None, "no decode step was replayed"
        with torch.inference_mode():
            for _ in range(steps):
                self._last.replay()
        self._captured.buffers.invalidate()

    def _capture_all(self, capture: Capture) -> None:
        """Capture the graphs. After a failure it is not tried again, since it would fail in every step.

        Without the second ones, rows are adjusted outside of graphs.

        Raises:
            DeviceLostError: The device has failed.
        """
        self._capture = None
        reason = _tried(lambda: self._capture_graphs(capture), self._kv.device)
        captured = self._captured
        if captured is None:
            self.name, self.can_launch = EagerRunner.name, False
            _log.warning("CUDA graphs were not captured, so each kernel of a decode is launched: %s", reason)
            return
        reason = _tried(lambda: self._capture_second_graphs(captured, capture), self._kv.device)
        if reason is not None:
            _log.warning("CUDA graphs were not captured, so masks are applied outside of them: %s", reason)

    def _capture_graphs(self, capture: Capture) -> None:
        """Graphs of each bucket. The largest is first, so that the others fit into its memory."""
        buffers = DecodeBuffers(self._max_rows, self._max_pages, self._kv.device, self._queue, self._share)
        kinds = (True, False) if self._model.max_lora_slots else (False,)
        self._captured = _Captured(buffers, self._capture_kinds(capture, buffers, kinds))

    def _capture_kinds(
        self, capture: Capture, buffers: DecodeBuffers, kinds: Sequence[bool]
    ) -> dict[tuple[int, bool], _Graph]:
        return {
            (bucket, lora): self._capture_one(capture, buffers, bucket, lora=lora)
            for bucket in reversed(self._buckets)
            for lora in kinds
        }

    def capture_lora(self) -> None:
        """Capture the graphs of decodes with adapters, for which the model has slots now. None is in flight.

        Without an effect if no graphs are captured yet: then the first decode captures these, too. After a
        failure, decodes with adapters run eagerly.

        Raises:
            DeviceLostError: The device has failed.
        """
        captured, capture = self._captured, self._lora_capture
        if captured is None or capture is None or captured.has_lora:
            return
        self._lora_capture = None
        with torch.inference_mode():
            reason = _tried(
                lambda: captured.add(self._capture_kinds(capture, captured.buffers, (True,))), self._kv.device
            )
        if reason is not None:
            _log.warning("CUDA graphs with adapters were not captured: %s", reason)

    def _capture_one(self, capture: Capture, buffers: DecodeBuffers, bucket: int, *, lora: bool) -> _Graph:
        # All rows are padded during warm-up and capture: no page is read or written.
        buffers.clear()
        logits: list[torch.Tensor] = []
        experts: list[torch.Tensor] = []

        def run() -> None:
            routed = RowCapture({}, expert_rows=None)
            logits[:] = [self._decode(buffers, bucket, routed, lora=lora)]
            experts[:] = routed.experts

        return _Graph(capture(run), logits, experts)

    def _capture_second_graphs(self, captured: _Captured, capture: Capture) -> None:
        """For each bucket of adjusted rows, the largest first. The rows are padded."""
        buffers, logits = captured.buffers, captured.graph(self._max_rows).logits[0]
        adjusted = AdjustedRows(self._max_rows, logits.shape[1], self._kv.device, buffers.queue)

        def captured_one(bucket: int) -> Callable[[], None]:
            return capture(lambda: choose_again(adjusted, bucket, buffers, logits))

        captured.adjust = {bucket: captured_one(bucket) for bucket in reversed(self._buckets)}
        captured.adjusted = adjusted

    def _decode(
        self, buffers: DecodeBuffers, bucket: int, capture: RowCapture, *, lora: bool
    ) -> torch.Tensor:
        """One step over the first `bucket` rows of the buffers. Returns the logits [bucket, vocab]."""
        # Without a GPU triton is not needed.
        from kernels.cuda import advance, sampling  # noqa: PLC0415

        inputs = buffers.inputs(bucket, lora=lora)
        hidden = self._model.forward(inputs, self._kv, capture)  # [bucket, hidden]
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
        return buffers.keep_logits(logits)


def choose_again(adjusted: AdjustedRows, bucket: int, buffers: DecodeBuffers, logits: torch.Tensor) -> None:
    """Choose once more for `bucket` adjusted rows of a batch with logits [B, vocab]."""
    for first in range(0, bucket, ROWS_AT_ONCE):
        part = slice(first, min(first + ROWS_AT_ONCE, bucket))
        adjusted.choose(part, logits, buffers.settings, buffers.results.chosen, buffers.results.best_left)
    buffers.use_chosen()
    adjusted.count_next(bucket, *buffers.tokens)


def _step_of(after: After) -> GraphStep:
    assert isinstance(after.step, GraphStep), "a runner follows its own steps"
    return after.step


def _tried(capture_all: Callable[[], None], device: torch.device) -> str | None:
    """Capture graphs. Returns why that has failed, if the device still works.

    Raises:
        DeviceLostError: It does not.
    """
    try:
        with device_errors(), _no_collection():
            capture_all()
        return None
    except DeviceLostError:
        raise
    except Exception as error:  # any failure: the work can be launched without graphs
        reason = _first_line(error.__cause__ if isinstance(error, CaptureError) else error)
    # Outside of the handler, nothing refers to the graphs captured before the failure.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return reason


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and none within the context.

    What is collected may call the device, and while a graph is captured that makes the capture fail.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CudaCapture:
    """Captures CUDA graphs. They share one memory pool, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all graphs: libraries keep a workspace for each stream.
        self._stream: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warms up, then captures `run`.

        Raises:
            CaptureError: It failed, and the device still works.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._warm_up(run)
            return self._record(run)
        except Exception as error:
            # If the device is lost, this call raises as well.
            torch.cuda.synchronize(self._device)
            raise CaptureError from error

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Run before the capture, so that kernels are compiled and libraries allocate their workspaces."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Not `torch.cuda.graph`: if a capture cannot be ended, that leaves its stream the current one.
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
        """End a failed capture. Its further errors are suppressed: the first one is reported."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The stream is usable again, but the allocator may still count a capture. If it does not, the
            # first of these calls raises, and the graph releases the pool itself.
            index = self._stream.device_index
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)  # noqa: SLF001
                torch._C._cuda_releasePool(index, self._pool)  # noqa: SLF001


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
