"""The records that `sequences.py` keeps: one Entry a cache, one Operation a request on its way."""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2, worker_pb2

from service.placement import WorkerView
from service.steps import Kind, Request, Rows, Step

_SHORT_TOKENS = 32


class State(enum.Enum):
    """Where a cache's KV is. A closed cache is in no table any more."""

    RESIDENT = enum.auto()
    LOST = enum.auto()


@dataclass(slots=True)
class AppliedStep:
    """The last step of a cache, kept to recognise and answer its repetition."""

    base: int
    tokens: object  # a fingerprint of the tokens
    kept: int
    rows: Rows
    accept: int
    output: types_pb2.OutputOptions | None
    # None: the answer held logits, is too large to keep, and would be computed again.
    done: worker_pb2.ForwardDone | None

    @classmethod
    def of(cls, step: Step, base: int, done: worker_pb2.ForwardDone) -> AppliedStep:
        """Remembers an applied step. Keeps neither its tokens nor returned logits alive."""
        large = step.output is not None and step.output.logits
        return cls(
            base=base,
            tokens=fingerprint(step.token_ids),
            kept=done.kept,
            rows=step.rows,
            accept=step.accept,
            output=step.output,
            done=None if large else done,
        )

    def is_repeated_by(self, step: Step, position: int) -> bool:
        """Whether `step` at `position` would do what was done already."""
        return (
            position == self.base
            and step.accept == self.accept
            and fingerprint(step.token_ids) == self.tokens
        )

    def answers(self, step: Step) -> worker_pb2.ForwardDone | None:
        """The stored answer, if the repetition asks for the very same output."""
        return self.done if step.rows == self.rows and step.output == self.output else None


@dataclass(slots=True)
class Operation:
    """A request on its way. The ticket is also the op id of the command that answers it."""

    ticket: int
    request: Request
    entry: Entry
    # Whose it is, see `ForwardCommand.caller`. Means nothing to the state machine.
    caller: int
    # Tokens the cache had when the step began.
    base: int = 0
    # The number of a temporary copy on which the last step's answer is computed again; applies nothing.
    copy_number: int | None = None
    # What a fork is making.
    children: list[Entry] = field(default_factory=list)
    # Counted in the worker's blocks_queued.
    pages: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One cache. `number` is its name towards the worker."""

    cache_id: str
    number: int
    worker: WorkerView
    seed: int
    lease_s: float
    expires_at_s: float
    state: State = State.RESIDENT
    length: int = 0
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int = 0
    # False until what creates it was applied: no caller knows the id yet.
    visible: bool = False
    # Grows in the order in which caches became visible.
    order: int = 0
    # Keeps no cache: gone after its one step.
    ephemeral: bool = False
    # Key of the creation, to recognise its repetition.
    request_id: str = ""
    last_step: AppliedStep | None = None
    running: Operation | None = None
    waiting: deque[Operation] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether an operation runs or waits."""
        return self.running is not None or bool(self.waiting)

    def prompt_len_after(self, step: Step) -> int:
        """The prompt boundary with `step` applied: a prefill makes everything so far prompt."""
        return self.length + len(step.token_ids) if step.kind is Kind.PREFILL else self.prompt_len


def fingerprint(token_ids: Sequence[int]) -> object:
    """Equal for equal tokens only, and small: long prompts are not kept alive by it."""
    if len(token_ids) <= _SHORT_TOKENS:
        return tuple(token_ids)
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
