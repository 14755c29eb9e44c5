"""Forwards that have begun, and the parts of them that steps run. Plain data without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.kv.table import KvSequence
from workers.operations import Forward, RowOutput


@dataclass(slots=True, eq=False)
class RunningForward:
    """A forward from `begin` to `complete` or `roll_back`. Only the engine writes to it.

    `computed` counts the tokens of the request whose KV is in the cache, `reused` those of them that were
    found there. `sequence` has pages reserved for the others, and of a tree for all.
    """

    op: Forward
    sequence: KvSequence
    reused: int
    computed: int
    started_ns: int
    steps: int = 0
    outputs: list[RowOutput] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    token_is_argmax: list[bool] = field(default_factory=list)
    samples: list[RowOutput] = field(default_factory=list)
    # A row of it has no token: nothing was appended, and it is to be rolled back.
    failure: Exception | None = None
    # Draws those that are left, a part at a time, and says what each part has cost.
    draws: Iterator[tuple[int, list[RowOutput]]] | None = None
    # Of a tree, once all of it is computed. Nothing of it is in the sequence before.
    kept_path: list[int] = field(default_factory=list)

    def add_scores(
        self, indexes: Sequence[int], logprobs: Sequence[float], is_argmax: Sequence[bool]
    ) -> None:
        """What was said of scored tokens, which are these of the request."""
        if not self.token_logprobs:
            self.token_logprobs, self.token_is_argmax = [0.0] * self.op.scored, [False] * self.op.scored
        first = len(self.op.token_ids) - self.op.scored
        for index, logprob, best in zip(indexes, logprobs, is_argmax, strict=True):
            self.token_logprobs[index - first], self.token_is_argmax[index - first] = logprob, best

    @property
    def remaining(self) -> int:
        """Tokens not yet in the cache."""
        return len(self.op.token_ids) - self.computed


@dataclass(frozen=True, slots=True)
class Behind:
    """A forward had better begin when another, which has begun, has computed so many of its tokens."""

    op_id: int
    computed: int


class Chunk:
    """Run `count` tokens of a forward, from `start` on, in this step.

    Attributes:
        op: The request of `running`.
        is_last: Whether nothing of the request is left to compute after it.
        token_ids: The tokens this step appends.
        rows: Of how many of them the row of logits is computed: the last ones, as far as the op wants them.
        wanted: The same as indices into `token_ids`.
        told: How many of these rows have an output: the last ones. The others only score what follows.
    """

    __slots__ = ("count", "is_last", "op", "rows", "running", "start", "token_ids", "told", "wanted")

    def __init__(self, running: RunningForward, start: int, count: int) -> None:
        op, end = running.op, start + count
        size = len(op.token_ids)
        self.running, self.op, self.start, self.count = running, op, start, count
        self.is_last = end == size
        self.token_ids = op.token_ids[start:end]
        self.rows = max(0, end - max(start, size - op.wanted_rows))
        self.wanted = range(count - self.rows, count)
        self.told = max(0, end - max(start, size - op.rows))
