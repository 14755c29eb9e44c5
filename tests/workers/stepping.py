"""Drives a step loop round by round, without a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.commands import Command
from tests.workers.late_runner import LateRunner
from workers.adapters.table import AdapterTable
from workers.decodes import NO_DECODES, Column, Decodes
from workers.drafting import Drafts
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.executors.weightless import PagedAttentionExecutor
from workers.kv.table import KvTable
from workers.kv_disk import KvDisk
from workers.operations import Chunk, Forward, Reset, Result
from workers.outputs import RowOutput
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop


def answered(result: Result) -> Forward:
    """A result that is that of a forward."""
    assert isinstance(result, Forward), result
    return result


def chosen(result: Result) -> int:
    """The token of the last row of a forward."""
    return answered(result).outputs[-1].token_id


def unhurried(drafting: Drafts) -> None:
    """It drafts for as long as that takes: how quick this machine is does not matter."""
    draft = drafting.draft

    def without_end(forwards: Sequence[Forward], table: KvTable, until_ns: int | None = None) -> None:
        draft(forwards, table)

    drafting.draft = without_end  # type: ignore[method-assign]


class Worker:
    """A step loop; `steps`: the sequences in each step. Without `max_seq_tokens` nothing is prelaunched.

    Plain decodes are sent as columns, as the gateway sends them, and their results are told as forwards.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        pages: int = 400,
        limits: tuple[int, int, int] = (64, 16, 64),
        max_seq_tokens: int = 0,
        adapters: AdapterTable[Any] | None = None,
        replacement: WeightsReplacement[Any] | None = None,
        kv_disk: KvDisk | None = None,
        drafting: Drafts | None = None,
    ) -> None:
        self.engine = engine or PagedAttentionExecutor.create(kv_pages=pages).engine
        self.steps: list[list[int]] = []
        self._results: list[Result | Decodes] = []
        self._asked: dict[int, Forward] = {}
        self.loop = StepLoop(
            self.engine,
            Scheduler(*limits),
            self._results.extend,
            max_seq_tokens,
            prelaunch_unrequested=max_seq_tokens > 0,
            adapters=adapters,
            replacement=replacement,
            kv_disk=kv_disk,
            drafting=drafting,
        )
        self._execute = self.engine.execute
        self.engine.execute = self._note  # type: ignore[method-assign]

    def compute_late(self) -> LateRunner:
        """Steps of plain decodes are in flight from now on."""
        self.engine.runner = late = LateRunner(self.engine.runner)
        return late

    def _note(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> Decodes:
        self.steps.append([*decodes.sequences, *(chunk.forward.sequence for chunk in chunks)])
        return self._execute(chunks, decodes)

    def round(self, *commands: Command | Reset) -> list[Result]:
        """Nothing happens without commands and forwards. What is answered."""
        if commands:
            # A forward holds what is computed of it: each worker has its own.
            own = [dataclasses.replace(one) if isinstance(one, Forward) else one for one in commands]
            self.loop.submit(self._sent(own))
        if commands or self.loop.operations_in_flight:
            self.loop.take()
            self.loop.flush()
            self.loop.step()
            self.loop.flush()
        self.engine.kv_table.check_integrity()
        results, self._results[:] = list(self._results), []
        return [one for result in results for one in self._received(result)]

    def _sent(self, commands: Sequence[Command | Reset]) -> list[Command | Reset | Decodes]:
        """In this order; plain decodes that follow each other together."""
        sent: list[Command | Reset | Decodes] = []
        plain: list[Forward] = []
        for command in commands:
            if isinstance(command, Forward) and command.is_plain:
                plain.append(command)
                self._asked[command.op_id] = command
                continue
            if plain:
                sent.append(Decodes.of(plain))
                plain = []
            sent.append(command)
        return [*sent, Decodes.of(plain)] if plain else sent

    def _received(self, result: Result | Decodes) -> list[Result]:
        if not isinstance(result, Decodes):
            return [result]
        found: list[Result] = []
        outputs = result.row_outputs or [RowOutput(token) for token in result.columns[Column.CHOSEN].tolist()]
        for row, output in zip(result.columns.T.tolist(), outputs, strict=True):
            forward = self._asked.pop(row[Column.OP_ID])
            assert output.token_id == row[Column.CHOSEN]
            forward.outputs, forward.kept, forward.steps = (output,), 1, 1
            forward.queue_ns, forward.compute_ns, forward.batch_items = (
                row[Column.QUEUE_NS],
                row[Column.COMPUTE_NS],
                row[Column.BATCH_ITEMS],
            )
            found.append(forward)
        return found

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

    def done(self, forward: Forward) -> Forward:
        """One that is answered."""
        return answered(self.answers(forward)[forward.op_id])

    def lengths(self) -> dict[int, int]:
        return {sequence.key: len(sequence) for sequence in self.engine.kv_table}

    def tokens(self) -> dict[int, list[int]]:
        return {sequence.key: list(sequence.token_ids) for sequence in self.engine.kv_table}
