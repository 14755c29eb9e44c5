"""A runner whose launched steps are computed late, as on a device that works on its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.runners.base import After, Runner, StepResult
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
        chunks: ForwardInputs | None,
        keeps_logits: bool,
        places: Sequence[int] = (),
    ) -> None:
        self._chunks, self._keeps_logits, self._places = chunks, keeps_logits, places
        self._runner, self._rows, self._before = runner, list(rows), before
        # The host may change its memory after a launch.
        self._inputs = dataclasses.replace(inputs, token_ids=inputs.token_ids.clone())
        self._result: StepResult | None = None
        self._asked = self.is_followed = False

    def is_done(self) -> bool:
        self._asked, asked = True, self._asked
        return asked

    def computed(self) -> StepResult:
        if self._result is None:
            if self._before is not None:
                self._continue(self._before)
            self._runner.computed += 1
            batch = self._inputs if self._chunks is None else self._inputs.with_chunks(self._chunks)
            self._result = self._runner.inner.step(batch, self._rows)
            if len(self._rows) > 1 and self._runner.fails():
                row = len(self._rows) - 1
                self._result.failed = {row: BadLogitsError([row])}
        return self._result

    def _continue(self, before: LateStep) -> None:
        """Take the tokens of the rows that continue that step."""
        chosen, is_same = before.computed().chosen.tolist(), not self._rows
        places = self._places or range(len(chosen))
        if is_same:
            self._rows = [dataclasses.replace(row, position=row.position + 1) for row in before._rows]
        for at, place in enumerate(places):
            if place < 0:
                continue
            self._inputs.token_ids[at] = chosen[place]
            row = self._rows[at]
            if len(row.history):
                known = row.history if is_same else row.history[:-1]
                self._rows[at] = dataclasses.replace(row, history=np.append(known, chosen[place]))

    def chosen(self) -> torch.Tensor:
        result = self.computed()
        if result.failed:
            raise BadLogitsError(list(result.failed))
        return result.chosen

    def logits(self) -> AbstractContextManager[torch.Tensor]:
        assert not self.is_followed or self._keeps_logits, "the next step overwrites them"
        return nullcontext(self.computed().logits)


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
        # Of these, how many had fewer rows, and how many had others.
        self.shrunk = self.joined = 0
        # And how many had adapters, which no graph behind another one applies.
        self.adapted_ahead = 0
        # Of those that were launched, how many had chunks.
        self.with_chunks = 0
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
        self,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        *,
        chunks: ForwardInputs | None = None,
        keeps_logits: bool = False,
        after: After | None = None,
    ) -> LateStep:
        self.with_chunks += chunks is not None
        if after is not None:
            return self._launch_after(inputs, rows, after, chunks=chunks, keeps_logits=keeps_logits)
        if self.last is not None:
            self.last.computed()
        self.last = LateStep(self, inputs, rows, None, chunks=chunks, keeps_logits=keeps_logits)
        return self.last

    def _launch_after(
        self,
        inputs: ForwardInputs,
        rows: Sequence[SamplingRow],
        after: After,
        *,
        chunks: ForwardInputs | None,
        keeps_logits: bool,
    ) -> LateStep:
        before = after.step
        assert isinstance(before, LateStep), "one of this runner"
        assert not before.is_followed and self.last is before, "something else was launched"
        self.adapted_ahead += inputs.lora_slots is not None
        before.is_followed = True
        places = [] if after.places is None else after.places.tolist()
        # A device knows these only.
        joins = torch.tensor([place < 0 for place in places] or [False] * len(inputs.token_ids))
        known = torch.where(joins, inputs.token_ids, -1)
        self.shrunk += bool(places) and sum(place >= 0 for place in places) < len(before._inputs.token_ids)
        self.joined += bool(joins.any())
        self.launched_ahead += 1
        self.last = LateStep(
            self,
            dataclasses.replace(inputs, token_ids=known),
            rows,
            before,
            chunks=chunks,
            keeps_logits=keeps_logits,
            places=places,
        )
        return self.last
