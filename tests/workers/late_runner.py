"""A runner whose launched steps are computed late, as on a device that works on its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.runners.base import Runner, SomeRows, StepResult
from workers.sampling import BadLogitsError, SamplingRow


class LateStep:
    """Computed when its tokens are read, or its next step's. Seems to be done when it is asked once more."""

    def __init__(
        self,
        runner: LateRunner,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        before: LateStep | None,
        *,
        keeps_logits: bool,
        some: SomeRows | None = None,
    ) -> None:
        self._keeps_logits, self._some = keeps_logits, some
        self._runner, self._rows, self._before = runner, rows, before
        # The host may change its memory after a launch.
        self._inputs = dataclasses.replace(inputs, token_ids=inputs.token_ids.clone())
        self._result: StepResult | None = None
        self._asked = self._is_followed = False

    def is_done(self) -> bool:
        self._asked, asked = True, self._asked
        return asked

    def computed(self) -> StepResult:
        if self._result is None:
            if self._before is not None:
                chosen = self._before.computed().chosen
                tokens = chosen if self._some is None else chosen[torch.from_numpy(self._some.places)]
                self._inputs = dataclasses.replace(self._inputs, token_ids=tokens)
            self._runner.computed += 1
            self._result = self._runner.inner.step(self._inputs, self._rows)
            if len(self._rows) > 1 and self._runner.fails():
                row = len(self._rows) - 1
                self._result.failed = {row: BadLogitsError([row])}
        return self._result

    def chosen(self) -> torch.Tensor:
        result = self.computed()
        if result.failed:
            raise BadLogitsError(list(result.failed))
        return result.chosen

    def logits(self) -> AbstractContextManager[torch.Tensor]:
        assert not self._is_followed or self._keeps_logits, "the next step overwrites them"
        return nullcontext(self.computed().logits)

    def launch_next(self, inputs: ForwardInputs, some: SomeRows | None = None) -> LateStep:
        assert not self._is_followed and self._runner.last is self, "something else was launched"
        self._is_followed = True
        rows = [dataclasses.replace(row, position=row.position + 1) for row in self._rows]
        if some is not None:
            rows = list(some.rows)
            self._runner.shrunk += 1
        # A device knows these only.
        unknown = dataclasses.replace(inputs, token_ids=torch.full_like(inputs.token_ids, -1))
        self._runner.launched_ahead += 1
        self._runner.last = LateStep(
            self._runner, unknown, rows, self, keeps_logits=self._keeps_logits, some=some
        )
        return self._runner.last


class LateRunner:
    can_launch = True

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.name, self.has_hidden_states = inner.name, inner.has_hidden_states
        self.last: LateStep | None = None
        # Whether a launched step has a row without a token. One of a single row never has: it would not be
        # repeated.
        self.fails: Callable[[], bool] = lambda: False
        # How many steps were launched before the one before them was read.
        self.launched_ahead = 0
        # Of these, how many had fewer rows.
        self.shrunk = 0
        # How many launched steps were computed, and how many others.
        self.computed = self.stepped = 0

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        # Behind what was launched.
        if self.last is not None:
            self.last.computed()
        self.stepped += 1
        return self.inner.step(inputs, rows, capture)

    def launch(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], *, keeps_logits: bool = False
    ) -> LateStep:
        if self.last is not None:
            self.last.computed()
        self.last = LateStep(self, inputs, rows, None, keeps_logits=keeps_logits)
        return self.last
