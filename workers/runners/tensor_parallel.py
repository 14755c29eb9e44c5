"""Tensor parallelism: rank 0 tells the other ranks of its group what it does to its device's memory.

Rank 0 has the step loop, the scheduler, the accounting of pages, and sampling. Before it runs a forward, it
sends the inputs to the others, and all compute the same forward over their parts of the model and of the
pages; only rank 0 gets logits. Copies of pages, adapters and other weights are sent in the same order. This
module is the only one that sends; `workers.follower` receives.

Decode steps on GPUs are launched ahead (`Runner.launch`) on all ranks: before a step that is launched behind
another one, the devices share the tokens that rank 0's has chosen. What rank 0 does with a step's results,
such as dropping them, the others need not know: their devices' memory is the same whether it does or not.

**After an error within a forward the ranks disagree about what comes next, so the group ends.**
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workers.adapters.errors import AdapterError
from workers.kv.sizing import KvSizingError
from workers.models.capture import RowCapture
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.lora import PackedLora
from workers.models.model import Model
from workers.runners.base import After, DeviceLostError, LaunchedStep, Runner, StepResult
from workers.runners.collectives import Collectives
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.runners.rank_plan import ForwardPlan, PlanKind, Way, encode, encode_forward, encode_pairs
from workers.runners.rank_processes import RankProcesses
from workers.sampling import SamplingError, SamplingRow

Answers = Callable[[], list[dict[str, Any]]]
"""Waits for the answers of the other ranks, in their order."""

# What a rank refuses; by these names in its answers.
REFUSALS = {error.__name__: error for error in (AdapterError, KvSizingError, ModelError)}


class RankGroup:
    """Rank 0's side of a group, which repeats what is done to its `KvTensors`."""

    def __init__(self, processes: RankProcesses) -> None:
        """Take processes, which `connect` connects."""
        self.processes = processes
        self.ranks = processes.ranks
        self.collectives = Collectives(0, processes.ranks)
        # Held from a question to its answers.
        self._asking = threading.Lock()
        # How many times weights were read that replace those that are served.
        self.weights_read = 0

    # Questions, from any thread.

    @contextmanager
    def asking(self, question: str, **details: object) -> Iterator[Answers]:
        """Ask all other ranks, and let the body of the `with` do rank 0's part meanwhile.

        The answers raise what a rank has refused: a ModelError, KvSizingError or AdapterError. If the body
        does not await them, this does at its end.

        Raises DeviceLostError if a rank has ended.
        """
        others, taken = self.processes.others, False

        def answers() -> list[dict[str, Any]]:
            nonlocal taken
            taken = True
            return [other.questions.receive() for other in others]

        def checked() -> list[dict[str, Any]]:
            found = answers()
            for answer in found:
                if "refused" in answer:
                    raise REFUSALS.get(answer["refused"], ModelError)(answer["why"])
            return found

        with self._asking:
            try:
                for other in others:
                    other.questions.send({"question": question, **details})
                try:
                    yield checked
                except BaseException:
                    if not taken:
                        answers()
                    raise
                if not taken:
                    checked()
            except (EOFError, BrokenPipeError, ConnectionResetError) as error:
                raise DeviceLostError(f"a rank has ended: {error!r}") from error

    # Plans, from the thread of the step loop.

    def run(self, plan: ForwardPlan) -> None:
        """Let the others run a forward, which the caller runs too."""
        self._send(encode_forward(plan))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._send(encode_pairs(PlanKind.COPY_PAGES, pairs))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._send(encode_pairs(PlanKind.MOVE_SLOTS, pairs))

    def set_lora(self, slot: int, key: int) -> None:
        """Let the others put an adapter that they have read into a slot; a key of -1 empties it.

        They make their slots before, if they have none. A slot of -1: that is all.
        """
        self._send(encode(PlanKind.SET_LORA, slot, key))

    def drop_weights(self) -> None:
        """Let the others drop weights that they have read, or are reading, for `use_weights`."""
        if self.weights_read:
            # By number: they may have begun to read the next ones when they get this.
            self._send(encode(PlanKind.DROP_WEIGHTS, self.weights_read))

    def use_weights(self) -> None:
        """Let the others use the weights that they have read last."""
        self._send(encode(PlanKind.USE_WEIGHTS, self.weights_read))

    def _send(self, message: bytes) -> None:
        try:
            for other in self.processes.others:
                other.plans.sendall(message)
        except OSError as error:
            raise DeviceLostError(f"a rank has ended: {error}") from error

    def close(self) -> None:
        """End the other ranks."""
        self.processes.close()


class LeadingRunner:
    """Rank 0's `Runner`."""

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        """Lead with `runner`."""
        self.inner = runner
        self._group = group
        self.has_hidden_states = runner.has_hidden_states

    def use(self, model: Model) -> None:
        assert isinstance(self.inner, EagerRunner), "weights of a GPU are copied into place"
        self.inner.use(model)

    @property
    def name(self) -> str:
        """See `Runner`."""
        return self.inner.name

    @property
    def can_launch(self) -> bool:
        """See `Runner`."""
        return self.inner.can_launch

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        inner = self.inner
        is_in_flight = isinstance(inner, CudaGraphRunner) and inner.is_in_flight
        # Hidden states are captured on rank 0 only, and a graph captures none.
        is_eager = is_in_flight or (capture is not None and bool(capture.rows))
        self._group.run(ForwardPlan(inputs, Way.EAGER if is_eager else Way.STEP))
        with _ends_group():
            return inner.step(inputs, rows, capture)

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        *,
        chunks: ForwardInputs | None = None,
        keeps_logits: bool = False,
        after: After | None = None,
    ) -> LaunchedStep | None:
        """See `Runner.launch`. The first decode is a step: all ranks capture their graphs then.

        Steps with chunks are not launched: the plans have no such step.
        """
        inner, is_announced = self.inner, False
        if not isinstance(inner, CudaGraphRunner) or inner.has_to_capture or chunks is not None:
            return None
        places = None if after is None else after.places

        def announce() -> None:
            nonlocal is_announced
            is_announced = True
            self._group.run(ForwardPlan(inputs, Way.LAUNCH if after is None else Way.AFTER, places))

        try:
            return inner.launch(inputs, rows, keeps_logits=keeps_logits, after=after, announce=announce)
        except Exception:
            if is_announced:
                with _ends_group():
                    raise
            raise


@contextmanager
def _ends_group() -> Iterator[None]:
    """Let the group end after an error within a forward that the other ranks run too."""
    try:
        yield
    except (SamplingError, DeviceLostError):
        raise
    except Exception as error:
        raise DeviceLostError(f"a step failed on rank 0, so the group has to end: {error!r}") from error


class RankedLora:
    """An adapter that all ranks have read: rank 0's part, and the key of the others'."""

    def __init__(self, packed: PackedLora, key: int) -> None:
        """`key`: from 0 on, larger than that of any adapter before."""
        self.packed, self.key = packed, key
