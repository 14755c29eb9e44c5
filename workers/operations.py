"""Forwards, and the results of all commands: data without torch.

`wire.py` converts messages to these and back. Commands other than forwards stay messages (`other_commands`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workers.common.worker_pb2 import WorkerEvent
from workers.outputs import GREEDY, OutputSpec, RowOutput, VerifyRow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from workers.given_experts import GivenExperts
    from workers.kv.sequence import KvSequence


class Kind(enum.Enum):
    """The kind of a forward. Each kind is counted separately.

    SCORE returns the logprobs of its tokens. REPLAY computes lost KV of a cache again.
    """

    PREFILL = enum.auto()
    DECODE = enum.auto()
    VERIFY = enum.auto()
    SCORE = enum.auto()
    REPLAY = enum.auto()


class Priority(enum.Enum):
    """The scheduling priority. The value is a number of head starts: see `service_class`."""

    LOW = -1
    NORMAL = 0
    HIGH = 1


class Accept(enum.Enum):
    """Which drafts a verify keeps: ALL of them, or those that equal the token CHOSEN at their position.

    In a tree, whose tokens are alternatives, ALL keeps only the root.
    """

    ALL = enum.auto()
    CHOSEN = enum.auto()


# The number of extra samples that cost as much as one row: see `Forward.row_weight`.
_DRAWS_PER_ROW = 16


# Without slots, so that fields which are no arguments cost nothing until they are set.
@dataclass(eq=False)
class Forward:
    """Append `token_ids` to `sequence` at `position`: the one primitive, from the command to its answer.

    The last `rows` tokens have an output: 0 none, 1 the last, len(token_ids) all. For the last `scored`
    tokens the answer has their logprobs given the tokens before. The first token cannot be scored.

    The request does not change. The scheduler and its queues write the scheduling state. The engine writes
    what was computed, and the answer. All may read everything.
    """

    # The request.

    op_id: int
    sequence: int
    position: int
    token_ids: Sequence[int]
    rows: int = 1
    output: OutputSpec = GREEDY
    accept: Accept = Accept.ALL
    kind: Kind = Kind.PREFILL
    # For fair queueing.
    caller: int = 0
    prompt_len: int = 0
    ephemeral: bool = False
    # A new sequence shares pages only with sequences of the same salt.
    salt: bytes = b""
    # The adapter of the sequence (0: none), and the slot that has it while the forward is scheduled (-1:
    # none).
    adapter: int = 0
    lora_slot: int = -1
    priority: Priority = Priority.NORMAL
    # It expires if it has not begun by this time.monotonic_ns(). None: never.
    deadline_ns: int | None = None
    arrived_ns: int = 0
    # The caller will probably append the chosen token this many times in a row, with the same output: see
    # `prelaunch`.
    prelaunch: int = 0
    scored: int = 0
    # One for each token, or empty.
    choices: Sequence[VerifyRow] = ()
    # If not empty, the tokens are a tree (`token_trees`), and all of its rows are computed.
    parents: Sequence[int] = ()
    # For each seed an extra token is drawn from the last row, if that has an output.
    sample_seeds: Sequence[int] = ()
    # The experts to compute with. Its sequence then has a salt of its own, since the KV depends on them.
    # None: the router chooses.
    experts: GivenExperts | None = None
    # It is computed before it is requested: see `prelaunch`.
    is_prelaunched: bool = False
    # How many tokens to draft after the chosen one: see `drafting`.
    draft_tokens: int = 0

    # How many of its last tokens have a row of logits: those with an output, and those that score the next.
    wanted_rows: int = field(init=False)
    # The cost of each of its rows, in plain rows. Extra samples cost a fraction of a row each. They are drawn
    # from the last row, but their cost is spread over all rows.
    row_weight: int = field(init=False)

    # Scheduling. Valid from `Scheduler.add` on.

    # Its number in order of arrival.
    arrival: int = field(default=-1, init=False)
    # Its service class, its cost there, and its place in that queue: (virtual_start, arrival).
    is_long: bool = field(default=False, init=False)
    cost: int = field(default=0, init=False)
    virtual_start: int = field(default=0, init=False)
    is_enqueued: bool = field(default=False, init=False)
    # How much of a step's row budget each of its rows takes.
    row_budget: int = field(default=1, init=False)
    # The number of the last step that it was put into.
    step: int = field(default=-1, init=False)
    # It begins once `waits_for` has computed `waits_until` tokens, or has left.
    waits_for: Forward | None = field(default=None, init=False, repr=False)
    waits_until: int = field(default=0, init=False)

    # What was computed. Valid from `Engine.begin` on.

    has_begun: bool = field(default=False, init=False)
    # Its sequence, which has pages reserved for the remaining tokens, or for all tokens of a tree.
    kv: KvSequence = field(init=False, repr=False)
    started_ns: int = field(default=0, init=False)
    # How many tokens of the request have KV, and how many of these were reused from shared pages.
    computed: int = field(default=0, init=False)
    reused: int = field(default=0, init=False)
    # The number of steps that it ran in.
    steps: int = field(default=0, init=False)
    # The number of forwards in its last step.
    batch_items: int = field(default=0, init=False)
    # The digest of the page that it fills next, if other forwards may wait for that: see `prefix_wait`.
    filling_digest: bytes | None = field(default=None, init=False)
    # Why one of its rows has no token. Then nothing was appended, and the forward has to be rolled back.
    failure: Exception | None = field(default=None, init=False)
    # Draws the remaining extra samples in batches, and yields each batch with its cost.
    draws: Iterator[tuple[int, list[RowOutput]]] | None = field(default=None, init=False, repr=False)

    # The answer. Complete after `Engine.complete`.

    outputs: Sequence[RowOutput] = field(default=(), init=False)
    # For each scored token: its logprob, and whether no other token was more likely.
    token_logprobs: Sequence[float] = field(default=(), init=False)
    token_is_argmax: Sequence[bool] = field(default=(), init=False)
    # For means: the sums of the computed tokens' hidden states, one [hidden size] for each requested layer.
    state_sums: Sequence[NDArray[np.float64]] = field(default=(), init=False, repr=False)
    # One for each of `sample_seeds`, without top logprobs and logits.
    samples: Sequence[RowOutput] = field(default=(), init=False)
    # For a tree: the indexes of the kept tokens. Only these are appended to the sequence.
    kept_path: Sequence[int] = field(default=(), init=False)
    # The number of tokens that are kept in the sequence, including `appended`.
    kept: int = field(default=0, init=False)
    # For a decode: chosen tokens that were appended after its own before they were requested, see
    # `prelaunch`. Each has an output, too.
    appended: Sequence[int] = field(default=(), init=False)
    # With `draft_tokens`, if the model drafts with its own head: the hidden state of each output row.
    hidden_rows: Sequence[Any] = field(default=(), init=False, repr=False)
    # The tokens that were drafted after the chosen one.
    drafts: Sequence[int] = field(default=(), init=False)
    # From arrival to `Engine.begin`, and from there to the end.
    queue_ns: int = field(default=0, init=False)
    compute_ns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.wanted_rows = max(self.rows, self.scored + 1) if self.scored else self.rows
        if self.rows and self.output.hidden is not None and self.output.hidden.mean:
            self.wanted_rows = len(self.token_ids)
        self.row_weight = self.output.row_weight
        if self.sample_seeds:
            self.row_weight += len(self.sample_seeds) // (_DRAWS_PER_ROW * max(1, self.wanted_rows))

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain decode: see `decodes`."""
        has_more = self.choices or self.parents or self.sample_seeds or self.scored or self.draft_tokens
        return (
            self.kind is Kind.DECODE
            and len(self.token_ids) == 1 == self.rows
            and self.output.is_plain
            and self.accept is Accept.ALL
            and self.position > 0
            and self.experts is None
            and not has_more
            and not self.ephemeral
        )

    @property
    def remaining(self) -> int:
        """Tokens left to compute."""
        return len(self.token_ids) - self.computed

    def add_scores(
        self, indexes: Sequence[int], logprobs: Sequence[float], is_argmax: Sequence[bool]
    ) -> None:
        """Store the scores of the request's tokens with these indexes."""
        all_logprobs = list(self.token_logprobs) or [0.0] * self.scored
        all_best = list(self.token_is_argmax) or [False] * self.scored
        first = len(self.token_ids) - self.scored
        for index, logprob, best in zip(indexes, logprobs, is_argmax, strict=True):
            all_logprobs[index - first], all_best[index - first] = logprob, best
        self.token_logprobs, self.token_is_argmax = all_logprobs, all_best


class Chunk:
    """The part of a forward that runs in this step: `count` tokens from `start` on.

    Attributes:
        is_last: Whether the forward ends with it.
        has_many: Whether it has more than one token. A GPU has a separate kernel for single tokens.
        token_ids: The tokens that this step appends.
        rows: How many of its last tokens have a row of logits.
        wanted: The indexes of these in `token_ids`.
        output_rows: How many of the last rows have an output. The rows before only score the next token.
        cost: Its tokens, and its rows by their weight.
    """

    __slots__ = (
        "cost", "count", "forward", "has_many", "is_last",
        "output_rows", "rows", "start", "token_ids", "wanted",
    )  # fmt: skip

    def __init__(self, forward: Forward, start: int, count: int) -> None:
        end, size = start + count, len(forward.token_ids)
        self.forward, self.start, self.count = forward, start, count
        self.is_last, self.has_many = end == size, count > 1
        self.token_ids = forward.token_ids[start:end]
        self.rows = max(0, end - max(start, size - forward.wanted_rows))
        self.wanted = range(count - self.rows, count)
        self.output_rows = max(0, end - max(start, size - forward.rows))
        self.cost = count + self.rows * forward.row_weight

    @property
    def may_be_launched(self) -> bool:
        """Whether a step with it can be launched ahead: no results of it are read back."""
        forward = self.forward
        return not (self.rows or self.is_last or forward.parents or forward.experts is not None)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter that forwards can name: a directory, and the digest of its files' content."""

    number: int
    directory: str
    # See `content_digest` in workers/common/adapter_files.py. Empty: any content is accepted.
    digest: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ReplacementRead:
    """Weights were read: they and their description, or an exception. Sent by the thread that reads."""

    op_id: int
    outcome: object


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """An adapter was read: a `LoadedAdapter`, or an exception. Sent by the thread that reads."""

    number: int
    outcome: object


@dataclass(frozen=True, slots=True)
class Reset:
    """The stream has changed: roll back all forwards, drop all results, and report the sequences.

    The server submits it before the commands of a new stream, and with `stream` 0 when a stream ends.
    """

    stream: int


class FailureReason(enum.Enum):
    """Why a command failed. A failed command has no effect."""

    KV_MISSING = enum.auto()
    KV_EXHAUSTED = enum.auto()
    FAULT = enum.auto()
    TIMEOUT = enum.auto()
    UNSUPPORTED = enum.auto()
    ADAPTER = enum.auto()
    WEIGHTS = enum.auto()


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed. `detail` is for logs, never for clients, except with ADAPTER."""

    op_id: int
    reason: FailureReason
    detail: str = ""
    pages_needed: int = 0
    pages_available: int = 0


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """The answer to an ordered snapshot. `intact` is None if no page was checked."""

    op_id: int
    intact: bool | None


@dataclass(frozen=True, slots=True)
class HeldSequences:
    """The answer to `Reset`: (sequence, length) of all sequences. Later results are the new stream's."""

    stream: int
    sequences: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The answer to a command to read weights: what model they make."""

    op_id: int
    # A ModelDescription.
    model: Any


# A complete forward is its own result. Results that need no conversion are events already.
Result = Forward | WorkerEvent | Failed | IntegrityReport | HeldSequences | WeightsRead
