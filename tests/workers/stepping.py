"""Drives a step loop round by round, without a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from workers.adapters.table import AdapterTable
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.executors.weightless import PagedAttentionExecutor
from workers.operations import Chunk, Command, Forward, Reset, Result
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop


class Worker:
    """A step loop; `steps`: the sequences in each step. Without `max_seq_tokens` nothing is prelaunched."""

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        pages: int = 400,
        limits: tuple[int, int, int] = (64, 16, 64),
        max_seq_tokens: int = 0,
        adapters: AdapterTable[Any] | None = None,
        replacement: WeightsReplacement[Any] | None = None,
    ) -> None:
        self.engine = engine or PagedAttentionExecutor.create(kv_pages=pages).engine
        self.steps: list[list[int]] = []
        self._results: list[Result] = []
        self.loop = StepLoop(
            self.engine,
            Scheduler(*limits),
            self._results.extend,
            max_seq_tokens,
            prelaunch_unrequested=max_seq_tokens > 0,
            adapters=adapters,
            replacement=replacement,
        )
        self._execute = self.engine.execute
        self.engine.execute = self._note  # type: ignore[method-assign]

    def _note(self, chunks: Sequence[Chunk]) -> None:
        self.steps.append([chunk.forward.sequence for chunk in chunks])
        self._execute(chunks)

    def round(self, *commands: Command | Reset) -> list[Result]:
        """Nothing happens without commands and forwards. What is answered."""
        if commands:
            # A forward holds what is computed of it: each worker has its own.
            self.loop.submit([dataclasses.replace(command) for command in commands])
        if commands or self.loop.operations_in_flight:
            self.loop.take()
            self.loop.flush()
            self.loop.step()
            self.loop.flush()
        self.engine.check_integrity()
        results, self._results[:] = list(self._results), []
        return results

    def answers(self, *commands: Command) -> dict[int, Result]:
        """Until all of them are answered."""
        found: dict[int, Result] = {}
        wanted = {command.op_id for command in commands}
        while wanted - found.keys():
            for result in self.round(*commands):
                assert not isinstance(result, Forward) or result.op_id > 0, "nobody asked for it"
                found[result.op_id] = result  # type: ignore[union-attr]
            commands = ()
        return found

    def lengths(self) -> dict[int, int]:
        return {sequence.key: len(sequence) for sequence in self.engine.sequences}
