"""The results of a step loop: what is answered, and whose next decode is computed before it is requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workers.adapters.table import AdapterTable
from workers.decodes import ADAPTER, NO_DECODES, PRELAUNCH, Decodes
from workers.executors.engine import Engine
from workers.failures import failure_of_running
from workers.operations import Failed, Forward, Result
from workers.prelaunch import Prelauncher, may_be_continued
from workers.scheduler import Scheduler

Emit = Callable[[Sequence[Result | Decodes]], None]


class Answers:
    """Owner of the results that are not emitted yet.

    Attributes:
        results: These.
        answered: Sequences that the running step has answered, whose callers may soon send the next token.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        prelauncher: Prelauncher,
        adapters: AdapterTable[Any] | None,
        emit: Emit,
    ) -> None:
        """`emit` is called by `flush`."""
        self._engine, self._scheduler, self._prelauncher = engine, scheduler, prelauncher
        self._adapters, self._emit = adapters, emit
        self.results: list[Result | Decodes] = []
        self.answered: list[int] = []
        # Of which adapters, or the model itself, logits were not finite.
        self._overflowed: set[str] = set()

    def flush(self) -> None:
        if self.results:
            results, self.results = self.results, []
            self._emit(results)

    def forward(self, forward: Forward) -> None:
        """Answers a forward that is complete, and prelaunches the next one of its sequence."""
        self.results.append(forward)
        if self._prelauncher.may_follow(wanted=forward.prelaunch > 0):
            if may_be_continued(forward):
                self._follow(Decodes.done([forward]))
                return
            self._prelauncher.drop([forward.sequence])
        if not forward.ephemeral:
            self.answered.append(forward.sequence)

    def decodes(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        """As `forward`, for plain decodes. `launched`: the next ones that run already."""
        self.results.append(decodes)
        self._go_on(decodes, launched)

    def ready(self, answers: Sequence[Decodes | Forward], decodes: Decodes) -> None:
        """Tells answers that were prelaunched. Goes on with these decodes: see `Prelauncher.consume`."""
        self.results += answers
        if decodes.size:
            self._go_on(decodes)

    def _go_on(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        if self._prelauncher.may_follow(wanted=any(decodes.columns[PRELAUNCH].tolist())):
            self._follow(decodes, launched)
        else:
            self.answered += decodes.sequences

    def _follow(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        """Prelaunches what follows, but for those whose adapter has no slot now."""
        if any(decodes.columns[ADAPTER].tolist()):
            assert self._adapters is not None, "others were refused"
            has_slot = self._adapters.assign_slots(decodes)
            self.answered += decodes.take(~has_slot).sequences
            decodes = decodes.take(has_slot)
        self.answered += self._prelauncher.follow(decodes, launched)

    def failed(self, forward: Forward, failure: Failed) -> None:
        """Answers a failed forward that has left the scheduler. A prelaunched one gets no answer."""
        if forward.is_prelaunched:
            self._prelauncher.forget(forward)
        else:
            self.results.append(failure)

    def failed_running(self, forward: Forward, error: Exception) -> None:
        """Rolls back and answers a forward that has failed in a step."""
        failure = failure_of_running(forward, error, self._overflowed)
        self._scheduler.remove(forward.op_id)
        self._engine.roll_back(forward)
        self.failed(forward, failure)
