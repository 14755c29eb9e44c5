"""Plain decodes as columns, from the message that requests them to the one that answers them.

A decode is *plain* if it appends one token to a sequence and requests no output that makes its row cost more
than others (`Forward.is_plain`). Nearly all forwards are plain. Those that arrive together stay together as
`Decodes`, so that a step takes a few vector operations instead of one object for each decode. A single one is
columns of length one. As with a `Forward`, the results are written into the same object.

Anything with several tokens, steps or rows is a `Forward`. A plain decode becomes one only while it waits in
a queue, runs alone, or fails (ADR 59).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.operations import Forward, Kind, Priority
from workers.outputs import OutputSpec, RowOutput

Columns = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Column:
    """Indexes of the columns of `Decodes`.

    Up to PRIORITY: the arguments of a `Forward`, and its number in order of arrival (ARRIVAL). From CHOSEN
    on: the results, which are the chosen token, and times and items as in `Forward`.
    """

    (
        OP_ID, SEQUENCE, CALLER, POSITION, TOKEN, PROMPT_LEN, PRELAUNCH, DEADLINE, ARRIVED_NS, ARRIVAL,
        ADAPTER, LORA_SLOT, PRIORITY, CHOSEN, QUEUE_NS, COMPUTE_NS, BATCH_ITEMS,
    ) = range(17)  # fmt: skip


WIDTH = Column.BATCH_ITEMS + 1
# The DEADLINE of decodes without one.
NEVER = (1 << 63) - 1
# The cost of a plain decode in fair queueing: a token and a row.
DECODE_COST = 2
_NO_ROWS = np.zeros(0, np.int64)
_NO_FAILURES: Mapping[int, Exception] = MappingProxyType({})


class Decodes:
    """N plain decodes of different sequences.

    Decodes that are computed before they are requested have a negative OP_ID: see `prelaunch`.

    Attributes:
        columns: [17, N] int64, the arguments and results; see `Column`. While they are in the scheduler, only
            it changes the arguments. The engine writes the results.
        outputs: [N] The requested outputs. Several decodes can have the same object.
        distinct_outputs: The different objects in `outputs`: usually one.
        sequences: [N] The column SEQUENCE as a list.
        rows: [N] int64, the rows of their sequences in the `KvTable`. Set when they begin.
        started_ns: When they began.
        row_outputs: [N] Set when they are computed. None: only tokens were requested.
        failures: By index, why a decode has no token after a step. Nothing was appended for it.
    """

    __slots__ = (
        "columns", "distinct_outputs", "failures", "outputs", "row_outputs", "rows", "sequences", "size",
        "started_ns",
    )  # fmt: skip

    def __init__(self, columns: Columns, outputs: Sequence[OutputSpec]) -> None:
        self.columns = columns
        self.outputs = outputs
        self.size = len(outputs)
        self.distinct_outputs = tuple(dict(zip(map(id, outputs), outputs, strict=True)).values())
        self.sequences: list[int] = columns[Column.SEQUENCE].tolist()
        self.rows = _NO_ROWS
        self.started_ns = 0
        self.row_outputs: Sequence[RowOutput] | None = None
        self.failures: Mapping[int, Exception] = _NO_FAILURES

    @classmethod
    def of(cls, forwards: Sequence[Forward]) -> Decodes:
        """Plain forwards as columns. For a forward of several tokens: as if its last token were a decode."""
        columns = np.array(
            [
                (
                    one.op_id, one.sequence, one.caller, one.position + len(one.token_ids) - 1,
                    one.token_ids[-1], one.prompt_len, one.prelaunch,
                    NEVER if one.deadline_ns is None else one.deadline_ns, one.arrived_ns, one.arrival,
                    one.adapter, one.lora_slot, one.priority.value, 0, 0, 0, 0,
                )
                for one in forwards
            ],
            np.int64,
        ).T  # fmt: skip
        return cls(columns, [one.output for one in forwards])

    @classmethod
    def done(cls, forwards: Sequence[Forward]) -> Decodes:
        """As `of`, with the results of the last row of each. All rows of the forwards must be computed."""
        decodes, now_ns, last = cls.of(forwards), time.monotonic_ns(), [one.outputs[-1] for one in forwards]
        columns = decodes.columns
        columns[Column.CHOSEN] = [output.token_id for output in last]
        columns[Column.QUEUE_NS] = [
            one.started_ns - one.arrived_ns if one.arrived_ns else 0 for one in forwards
        ]
        columns[Column.COMPUTE_NS] = [now_ns - one.started_ns for one in forwards]
        columns[Column.BATCH_ITEMS] = [one.batch_items for one in forwards]
        if not all(one.output.is_token_only for one in forwards):
            decodes.row_outputs = last
        return decodes

    @classmethod
    def joined(cls, parts: Sequence[Decodes]) -> Decodes:
        """Joins decodes that have not begun, in this order."""
        if len(parts) == 1:
            return parts[0]
        columns = np.concatenate([part.columns for part in parts], axis=1)
        return cls(columns, [output for part in parts for output in part.outputs])

    def column(self, which: int) -> list[int]:
        values: list[int] = self.columns[which].tolist()
        return values

    @property
    def prelaunched(self) -> Mask:
        """[N] bool, which are computed before they are requested."""
        is_ahead: Mask = self.columns[Column.OP_ID] < 0
        return is_ahead

    @property
    def may_be_launched(self) -> bool:
        """Whether a step of them can be launched ahead: none has an adapter or requests experts."""
        has_adapter = any(self.columns[Column.ADAPTER].tolist())
        return not has_adapter and not any(spec.experts for spec in self.distinct_outputs)

    def take(self, which: Mask) -> Decodes:
        indexes = which.nonzero()[0]
        if len(indexes) in (0, self.size):
            return self if len(indexes) else NO_DECODES
        return self.select(indexes)

    def select(self, indexes: NDArray[np.int64]) -> Decodes:
        """The decodes with these indexes, in this order."""
        taken = Decodes(self.columns[:, indexes], [self.outputs[index] for index in indexes.tolist()])
        taken.started_ns = self.started_ns
        if self.started_ns:
            taken.rows = self.rows[indexes]
        if self.row_outputs is not None:
            taken.row_outputs = [self.row_outputs[index] for index in indexes.tolist()]
        return taken

    def forward(self, index: int) -> Forward:
        """One of them as a forward, which has not begun."""
        row: list[Any] = self.columns[:, index].tolist()
        forward = Forward(
            op_id=row[Column.OP_ID],
            sequence=row[Column.SEQUENCE],
            position=row[Column.POSITION],
            token_ids=(row[Column.TOKEN],),
            output=self.outputs[index],
            kind=Kind.DECODE,
            caller=row[Column.CALLER],
            prompt_len=row[Column.PROMPT_LEN],
            adapter=row[Column.ADAPTER],
            lora_slot=row[Column.LORA_SLOT],
            priority=Priority(row[Column.PRIORITY]),
            deadline_ns=None if row[Column.DEADLINE] == NEVER else row[Column.DEADLINE],
            arrived_ns=row[Column.ARRIVED_NS],
            prelaunch=row[Column.PRELAUNCH],
            is_prelaunched=row[Column.OP_ID] < 0,
        )
        forward.arrival = row[Column.ARRIVAL]
        return forward

    def forwards(self) -> list[Forward]:
        return [self.forward(index) for index in range(self.size)]

    def costs(self) -> dict[int, int]:
        """Their cost by caller."""
        costs: dict[int, int] = {}
        for caller in self.column(Column.CALLER):
            costs[caller] = costs.get(caller, 0) + DECODE_COST
        return costs


NO_DECODES = Decodes(np.zeros((WIDTH, 0), np.int64), ())
