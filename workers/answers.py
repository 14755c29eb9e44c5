"""Ends forwards: draws their extra samples, drafts what follows them, and answers them.

Plain decodes have neither extra samples nor drafts. The step loop answers all of a step together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from workers.decodes import Decodes
from workers.drafting import Drafts
from workers.executors.engine import Engine
from workers.failures import failure_of_running
from workers.logging import get_logger
from workers.operations import Chunk, Failed, Forward, Result
from workers.prelaunch import Prelauncher, may_be_continued
from workers.runners.base import DeviceLostError
from workers.scheduler import Scheduler

_log = get_logger(__name__)

Emit = Callable[[Sequence[Result | Decodes]], None]

# The cost of samples that are drawn between two steps, as `draw_extra_samples` counts it: a few milliseconds.
_DRAWN_COST = 1 << 21
# The most forwards that draw in turns. Each takes several times the memory of its row of logits.
_MAX_DRAWING = 16


class Answers:
    """Owner of results that are not emitted yet, and of forwards that are computed but not answered.

    Attributes:
        results: The results that `flush` emits.
        answered: Sequences that the running step has answered. Their callers may soon send the next token.
        drawing: Forwards with extra samples left to draw, the next one first.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        prelauncher: Prelauncher,
        drafting: Drafts | None,
        emit: Emit,
    ) -> None:
        """`emit` is called by `flush`."""
        self._engine, self._scheduler, self._prelauncher = engine, scheduler, prelauncher
        self._drafting, self._emit = drafting, emit
        self.results: list[Result | Decodes] = []
        self.answered: list[int] = []
        self.drawing: deque[Forward] = deque()
        # Forwards that want drafts.
        self._to_draft: list[Forward] = []
        # The adapters, or the model itself, whose logits were not finite.
        self._overflowed: set[str] = set()

    def flush(self) -> None:
        if self.results:
            results, self.results = self.results, []
            self._emit(results)

    def finish(self, chunks: Sequence[Chunk]) -> list[Forward]:
        """Ends the forwards of a step whose last chunk has run. Returns those that are plain decodes.

        Forwards that want drafts are answered by `draft`, those with extra samples by `draw`.
        """
        plain: list[Forward] = []
        for chunk in chunks:
            forward = chunk.forward
            if forward.failure is not None:
                self.failed_running(forward, forward.failure)
            elif not self._scheduler.advance(chunk):
                continue
            elif forward.is_plain:
                plain.append(forward)
            elif forward.sample_seeds:
                self.drawing.append(forward)
            else:
                self._engine.complete(forward)
                if forward.draft_tokens and self._drafting is not None:
                    self._to_draft.append(forward)
                else:
                    self._answer(forward)
        return plain

    def draft(self, began_ns: int) -> None:
        """Drafts for the forwards that want it, and answers them, after a step that began at `began_ns`.

        If others wait for the next step, drafting takes at most as long as the step did.
        """
        forwards, self._to_draft = self._to_draft, []
        if not forwards or self._drafting is None:
            return
        self.flush()
        now_ns, has_others = time.monotonic_ns(), len(self.answered) or len(self._scheduler)
        until_ns = 2 * now_ns - began_ns if has_others else None
        try:
            self._drafting.draft(forwards, self._engine.kv_table, until_ns)
        except DeviceLostError:
            raise
        except Exception as error:
            _log.error("tokens could not be drafted", exc_info=error)
            for forward in forwards:
                forward.drafts = ()
        for forward in forwards:
            self._answer(forward)

    def draw(self) -> None:
        """Draws some extra samples, one forward after the other. Answers forwards that have all of theirs."""
        left = _DRAWN_COST
        while self.drawing and left > 0:
            forward = self.drawing.popleft()
            try:
                cost = self._engine.draw(forward)
            except DeviceLostError:
                raise
            except Exception as error:
                self.failed_running(forward, error)
                continue
            left -= cost
            if cost:
                # Behind the others that draw in turns, before those that have not started to draw.
                self.drawing.insert(_MAX_DRAWING - 1, forward)
            else:
                self._engine.complete(forward)
                self._answer(forward)

    def drop_drawing(self, op_id: int | None = None) -> None:
        """Rolls back the forward `op_id` if it is drawing (None: all that are). They get no answer."""
        for forward in [one for one in self.drawing if op_id in (None, one.op_id)]:
            self.drawing.remove(forward)
            self._engine.roll_back(forward)

    def _answer(self, forward: Forward) -> None:
        """Answers a complete forward, and may prelaunch the next one of its sequence."""
        self.results.append(forward)
        if self._prelauncher.may_follow(wanted=forward.prelaunch > 0):
            if may_be_continued(forward):
                self.answered += self._prelauncher.follow(Decodes.done([forward]))
                return
            self._prelauncher.drop([forward.sequence])
        if not forward.ephemeral:
            self.answered.append(forward.sequence)

    def failed(self, forward: Forward, failure: Failed) -> None:
        """Answers a failed forward that has left the scheduler. A prelaunched one gets no answer."""
        if forward.is_prelaunched:
            self._prelauncher.forget(forward)
        else:
            self.results.append(failure)

    def failed_running(self, forward: Forward, error: Exception) -> None:
        """Rolls back and answers a forward that failed in a step."""
        failure = failure_of_running(forward, error, self._overflowed)
        self._scheduler.remove(forward.op_id)
        self._engine.roll_back(forward)
        self.failed(forward, failure)
