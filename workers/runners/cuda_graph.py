"""The decode runner of CUDA devices: one CUDA graph for each batch size, replayed in every step.

Launching the kernels of a decode step from Python takes longer than running them. A graph contains them all,
from the embedding to the choice of the next tokens, and takes one launch. Everything that differs between
steps (tokens, positions, lengths, pages) is in fixed device memory, owned by `decode_buffers`.

A batch runs in the smallest bucket that it fits, and the other rows are padded. Graphs are captured on the
first decode: for each size one; when the model has slots for adapters, one that only batches with adapters
replay. Rows with a mask, biases, penalties or filters are chosen once more, by a short second
graph (`adjusted_rows`). Other steps (prefills, mixed batches, verifies, larger batches, captured hidden
states, given experts, tokens that follow an older state) run eagerly with the same kernels. So do decodes,
more slowly, if a capture fails. With graphs switched off, the kernels of a decode are launched one by one,
over the same memory and as far ahead.

While a step of decodes runs, the next one can be launched (`launch`) for callers that continue with the
chosen tokens, with other rows whose tokens the host knows. So the device does not wait for the host between
steps. Chunks of prompts may be in the same forward, which is then launched kernel by kernel over the memory
of the graph. Until the tokens of the last launched step are read, its buffers are in use: other steps run
eagerly, after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from workers.device_sampling import ROWS_AT_ONCE
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.model import Model
from workers.runners.adjusted_rows import AdjustedRows, adjusted_among
from workers.runners.base import After, StepResult, device_errors
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.device_queue import DeviceQueue
from workers.runners.eager import EagerRunner, choose_tokens
from workers.runners.graph_capture import Capture, CudaCapture, failure_of, launch_each
from workers.runners.graph_steps import CapturedGraphs, Graph, GraphStep
from workers.sampling import SamplingRow

_log = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """The sizes that batches of up to `max_rows` are padded to, ascending. Larger than 256 run eagerly."""
    largest = min(max_rows, _BUCKETS[-1])
    return (*(size for size in _BUCKETS if size < largest), largest)


def _announce_to_nobody() -> None:
    pass


class CudaGraphRunner:
    """A `Runner` that replays decode steps, and runs everything else eagerly.

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
        # The slots of a state are known when its step is run.
        self.can_launch = not model.state_shapes
        # None after the first use.
        self._capture: Capture | None = capture or (CudaCapture(kv.device) if graphs else launch_each)
        # The same, for the graphs that are captured when the model has slots for adapters.
        self._lora_capture: Capture | None = self._capture
        self._queue, self._share = queue, share
        self._captured: CapturedGraphs | None = None
        self._last: Graph | None = None

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
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
        chunks: ForwardInputs | None = None,
        keeps_logits: bool = False,
        after: After | None = None,
        announce: Callable[[], None] = _announce_to_nobody,
    ) -> GraphStep | None:
        """See `Runner.launch`.

        `announce`: called before the first launch that the other ranks of a group have to repeat.
        """
        with device_errors(), torch.inference_mode():
            if after is not None and after.places is None:
                return self._repeat(after, inputs, chunks, announce, keeps_logits=keeps_logits)
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
            graph = self._graph(captured, inputs, chunks)
            return GraphStep(captured, graph, inputs, adjust, keeps_logits=keeps_logits)

    def _repeat(
        self,
        after: After,
        inputs: ForwardInputs,
        chunks: ForwardInputs | None,
        announce: Callable[[], None],
        *,
        keeps_logits: bool,
    ) -> GraphStep:
        """Launch a step of the rows of the one before it, which are chosen as before."""
        captured, before = self._captured, _step_of(after)
        assert captured is not None, "it has launched the step before"
        announce()
        before.note_next()
        captured.buffers.load_after(inputs, (), None)
        graph = self._graph(captured, inputs, chunks)
        return GraphStep(captured, graph, inputs, before.adjust, keeps_logits=keeps_logits)

    @property
    def is_in_flight(self) -> bool:
        """Whether the tokens of a launched step are not read yet, so that others run eagerly."""
        return self._captured is not None and self._captured.in_flight is not None

    @property
    def has_to_capture(self) -> bool:
        """Whether the next decode captures the graphs."""
        return self._capture is not None

    def _captured_after(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> CapturedGraphs | None:
        """The graphs, if one of them computes this step behind the one in flight."""
        fits = self._is_decode(inputs, rows) and inputs.lora_slots is None
        return self._captured if fits else None

    def _captured_for(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> CapturedGraphs | None:
        """The graphs, if one of them computes this step."""
        if not self._is_decode(inputs, rows):
            return None
        if self._capture is not None:
            self._capture_all(self._capture)
        captured = self._captured
        if captured is None or captured.in_flight is not None:
            return None
        return None if inputs.lora_slots is not None and not captured.has_lora else captured

    def _graph(
        self, captured: CapturedGraphs, inputs: ForwardInputs, chunks: ForwardInputs | None = None
    ) -> Graph:
        """The graph of a step that is loaded. With chunks: what launches it kernel by kernel."""
        rows, buffers = len(inputs.positions), captured.buffers
        graph = captured.graph(rows, lora=inputs.lora_slots is not None)
        if chunks is None:
            self._last = graph
            return graph
        sent = chunks.to(self._kv.device, pinned=True)

        def launch() -> None:
            self._decode(buffers, rows, None, lora=False, chunks=sent)

        return Graph(launch, graph.logits, [])

    def _is_decode(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> bool:
        """Whether every item appends one token and wants its row, and there is a bucket for that."""
        items = len(inputs.attention.query_lens)
        return (
            inputs.token_ids.shape[0] == items == len(rows) <= self._max_rows
            and max(inputs.attention.query_lens) == 1
            and inputs.attention.trees is None
            and inputs.experts is None
            and not any(run.before for run in inputs.states)
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

        Raises DeviceLostError if the device has failed.
        """
        self._capture = None
        reason = failure_of(lambda: self._capture_graphs(capture), self._kv.device)
        captured = self._captured
        if captured is None:
            self.name, self.can_launch = EagerRunner.name, False
            _log.warning("CUDA graphs were not captured, so each kernel of a decode is launched: %s", reason)
            return
        reason = failure_of(lambda: self._capture_second_graphs(captured, capture), self._kv.device)
        if reason is not None:
            _log.warning("CUDA graphs were not captured, so masks are applied outside of them: %s", reason)

    def _capture_graphs(self, capture: Capture) -> None:
        """Graphs of each bucket. The largest is first, so that the others fit into its memory."""
        buffers = DecodeBuffers(self._max_rows, self._max_pages, self._kv.device, self._queue, self._share)
        kinds = (True, False) if self._model.max_lora_slots else (False,)
        self._captured = CapturedGraphs(buffers, self._capture_kinds(capture, buffers, kinds))

    def _capture_kinds(
        self, capture: Capture, buffers: DecodeBuffers, kinds: Sequence[bool]
    ) -> dict[tuple[int, bool], Graph]:
        return {
            (bucket, lora): self._capture_one(capture, buffers, bucket, lora=lora)
            for bucket in reversed(self._buckets)
            for lora in kinds
        }

    def capture_lora(self) -> None:
        """Capture the graphs of decodes with adapters, for which the model has slots now. None is in flight.

        Without an effect if no graphs are captured yet: then the first decode captures these, too. After a
        failure, decodes with adapters run eagerly.

        Raises DeviceLostError if the device has failed.
        """
        captured, capture = self._captured, self._lora_capture
        if captured is None or capture is None or captured.has_lora:
            return
        self._lora_capture = None
        with torch.inference_mode():
            reason = failure_of(
                lambda: captured.add(self._capture_kinds(capture, captured.buffers, (True,))), self._kv.device
            )
        if reason is not None:
            _log.warning("CUDA graphs with adapters were not captured: %s", reason)

    def _capture_one(self, capture: Capture, buffers: DecodeBuffers, bucket: int, *, lora: bool) -> Graph:
        # All rows are padded during warm-up and capture: no page is read or written.
        buffers.clear()
        logits: list[torch.Tensor] = []
        experts: list[torch.Tensor] = []

        def run() -> None:
            routed = RowCapture({}, expert_rows=None)
            logits[:] = [self._decode(buffers, bucket, routed, lora=lora)]
            experts[:] = routed.experts

        return Graph(capture(run), logits, experts)

    def _capture_second_graphs(self, captured: CapturedGraphs, capture: Capture) -> None:
        """For each bucket of adjusted rows, the largest first. The rows are padded."""
        buffers, logits = captured.buffers, captured.graph(self._max_rows).logits[0]
        adjusted = AdjustedRows(self._max_rows, logits.shape[1], self._kv.device, buffers.queue)

        def captured_one(bucket: int) -> Callable[[], None]:
            return capture(lambda: choose_again(adjusted, bucket, buffers, logits))

        captured.adjust = {bucket: captured_one(bucket) for bucket in reversed(self._buckets)}
        captured.adjusted = adjusted

    def _decode(
        self,
        buffers: DecodeBuffers,
        bucket: int,
        capture: RowCapture | None,
        *,
        lora: bool,
        chunks: ForwardInputs | None = None,
    ) -> torch.Tensor:
        """One step over the first `bucket` rows of the buffers, and chunks that are on the device.

        Returns the logits [bucket, vocab].
        """
        # Without a GPU triton is not needed.
        from kernels.cuda import advance, sampling  # noqa: PLC0415

        inputs = buffers.inputs(bucket, lora=lora)
        batch = inputs if chunks is None else inputs.with_chunks(chunks)
        hidden = self._model.forward(batch, self._kv, capture)  # [bucket, hidden]
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
