"""Plain decodes as columns, from the message that asks for them to the one that answers.

A decode is *plain* if it appends one token to a sequence without an adapter, with normal priority, and needs
no more than its row of logits (`OutputSpec.is_plain`). Nearly all forwards are. Those of one message stay
together as `Decodes`, and their results as `DecodesDone`, so that a step takes a few vector operations
instead of objects for each. Any of them can become a `Forward`, which the step loop can queue, run alone,
abort and fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.operations import Forward, Kind, OutputSpec, RowOutput

Columns = NDArray[np.int64]
Mask = NDArray[np.bool_]

# The columns of `Decodes`: as the arguments of a `Forward`, and its number in order of arrival.
(OP_ID, SEQUENCE, CALLER, POSITION, TOKEN, PROMPT_LEN, PRELAUNCH, DEADLINE, ARRIVED_NS, ARRIVAL) = range(10)
WIDTH = 10
# The deadline of those that have none.
NEVER = (1 << 63) - 1
# The columns of `DecodesDone`.
(_, CHOSEN, QUEUE_NS, COMPUTE_NS, BATCH_ITEMS) = range(5)
DONE_WIDTH = 5
_NO_ROWS = np.zeros(0, np.int64)
_NO_FAILURES: Mapping[int, Exception] = MappingProxyType({})


class Decodes:
    """Plain decodes of different sequences.

    A negative op_id is of one that is computed before it is requested: see `prelaunch`.

    Attributes:
        columns: [10, N] Their arguments. Changed by the scheduler only, which sets ARRIVAL.
        outputs: N of them, which can be one object.
        kinds: The different ones of these: mostly one.
        sequences: That column as a list.
        rows: [N] The rows of their sequences in the `KvTable`, once they have begun.
        started_ns: When they have begun.
        failures: Why some of them have no token after a step, by index. Nothing was appended for these.
    """

    __slots__ = ("columns", "failures", "kinds", "outputs", "rows", "sequences", "size", "started_ns")

    def __init__(self, columns: Columns, outputs: Sequence[OutputSpec]) -> None:
        self.columns = columns
        self.outputs = outputs
        self.size = len(outputs)
        self.kinds = tuple(dict(zip(map(id, outputs), outputs, strict=True)).values())
        self.sequences: list[int] = columns[SEQUENCE].tolist()
        self.rows = _NO_ROWS
        self.started_ns = 0
        self.failures: Mapping[int, Exception] = _NO_FAILURES

    @classmethod
    def of(cls, forwards: Sequence[Forward]) -> Decodes:
        """The same as columns, of forwards that are plain."""
        columns = np.zeros((WIDTH, len(forwards)), np.int64)
        columns[: ARRIVED_NS + 1] = np.array(
            [
                (
                    one.op_id, one.sequence, one.caller, one.position, one.token_ids[0], one.prompt_len,
                    one.prelaunch, NEVER if one.deadline_ns is None else one.deadline_ns, one.arrived_ns,
                )
                for one in forwards
            ],
            np.int64,
        ).T  # fmt: skip
        return cls(columns, [one.output for one in forwards])

    @classmethod
    def joined(cls, parts: Sequence[Decodes]) -> Decodes:
        """All of them, in this order. None has begun."""
        if len(parts) == 1:
            return parts[0]
        columns = np.concatenate([part.columns for part in parts], axis=1)
        return cls(columns, [output for part in parts for output in part.outputs])

    def __len__(self) -> int:
        return self.size

    def column(self, which: int) -> list[int]:
        """The values of a column."""
        values: list[int] = self.columns[which].tolist()
        return values

    @property
    def prelaunched(self) -> Mask:
        """Which are computed before they are requested."""
        is_ahead: Mask = self.columns[OP_ID] < 0
        return is_ahead

    def take(self, which: Mask) -> Decodes:
        """Some of them."""
        indexes = which.nonzero()[0]
        if len(indexes) in (0, self.size):
            return self if len(indexes) else NO_DECODES
        taken = Decodes(self.columns[:, indexes], [self.outputs[index] for index in indexes.tolist()])
        taken.started_ns = self.started_ns
        if self.started_ns:
            taken.rows = self.rows[indexes]
        return taken

    def forward(self, index: int) -> Forward:
        """One of them as a forward, which has not begun."""
        row: list[Any] = self.columns[:, index].tolist()
        return Forward(
            op_id=row[OP_ID],
            sequence=row[SEQUENCE],
            position=row[POSITION],
            token_ids=(row[TOKEN],),
            output=self.outputs[index],
            kind=Kind.DECODE,
            caller=row[CALLER],
            prompt_len=row[PROMPT_LEN],
            deadline_ns=None if row[DEADLINE] == NEVER else row[DEADLINE],
            arrived_ns=row[ARRIVED_NS],
            prelaunch=bool(row[PRELAUNCH]),
            is_prelaunched=row[OP_ID] < 0,
        )

    def forwards(self) -> list[Forward]:
        """All of them as forwards."""
        return [self.forward(index) for index in range(len(self))]


NO_DECODES = Decodes(np.zeros((WIDTH, 0), np.int64), ())


class DecodesDone:
    """The results of plain decodes, whose tokens are all kept.

    Attributes:
        columns: [5, N] The op_id and the chosen token of each, and its times as in `Forward`.
        outputs: N of them. None: nothing but the tokens was requested.
    """

    __slots__ = ("columns", "outputs")

    def __init__(self, columns: Columns, outputs: Sequence[RowOutput] | None) -> None:
        self.columns = columns
        self.outputs = outputs

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, which: Mask) -> DecodesDone:
        """The results of some of them."""
        indexes = which.nonzero()[0]
        if len(indexes) == len(self):
            return self
        outputs = None if self.outputs is None else [self.outputs[index] for index in indexes.tolist()]
        return DecodesDone(self.columns[:, indexes], outputs)
