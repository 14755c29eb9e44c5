"""The extra samples of forwards that have run, which are drawn between steps, in slices."""

from __future__ import annotations

from collections import deque

from workers.answers import Answers
from workers.executors.engine import Engine
from workers.operations import Forward
from workers.runners.base import DeviceLostError

# Cost of what is drawn between two steps, as `draw_extra_samples` counts it: a few milliseconds.
_BUDGET = 1 << 21
# At most so many forwards draw in turns: each takes several times the memory of its row of logits.
_MOST_DRAWING = 16


class Drawing:
    """Owner of the forwards that have samples left to draw: `forwards`, the next one first."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine, self._answers = engine, answers
        self.forwards: deque[Forward] = deque()

    def advance(self) -> None:
        """Draws some samples, one forward after the other. Answers forwards that have all."""
        left = _BUDGET
        while self.forwards and left > 0:
            forward = self.forwards.popleft()
            try:
                cost = self._engine.draw(forward)
            except DeviceLostError:
                raise
            except Exception as error:
                self._answers.failed_running(forward, error)
                continue
            left -= cost
            if cost:
                # Before the forwards that have not started to draw.
                self.forwards.insert(_MOST_DRAWING - 1, forward)
            else:
                self._engine.complete(forward)
                self._answers.forward(forward)

    def drop(self, op_id: int | None = None) -> None:
        """Rolls back the forward of an operation, or all of them. They get no answer."""
        for forward in [one for one in self.forwards if op_id in (None, one.op_id)]:
            self.forwards.remove(forward)
            self._engine.roll_back(forward)
