"""What a worker can be asked to do, and what it answers: plain data without protobuf or torch.

`wire.py` translates the wire protocol into these and back; everything below it speaks only these.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Kind(enum.Enum):
    """What a forward is to its caller.

    Counted apart. Prefills do not delay the others; a scoring is answered with its tokens' log-probabilities.
    """

    PREFILL = enum.auto()
    DECODE = enum.auto()
    VERIFY = enum.auto()
    SCORE = enum.auto()


class Priority(enum.Enum):
    """Who goes first."""

    LOW = enum.auto()
    NORMAL = enum.auto()
    HIGH = enum.auto()


class Accept(enum.Enum):
    """Which drafts a verify keeps: all of them, or those that equal the chosen token before them.

    All of a tree cannot be kept: its root is.
    """

    ALL = enum.auto()
    CHOSEN = enum.auto()


# See `Forward.row_weight`.
_DRAWS_PER_ROW = 16
# See `OutputSpec.row_weight`.
_LOGITS_WEIGHT = 3
_LISTED_PER_ROW = 512
_LAYERS_PER_ROW = 4


class LogitsFormat(enum.Enum):
    """Number format of returned logits, and of hidden states."""

    F32 = enum.auto()
    BF16 = enum.auto()
    F16 = enum.auto()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from a row of logits; the defaults have no effect (greedy).

    Applied in this order: mask and logit_bias, penalties, temperature, top_k, top_p, min_p, draw.
    The draw is a pure function of (seed, position).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    # Where frequency and presence penalties begin to count; None: behind the prompt.
    penalty_from: int | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens of the sequence so far matter."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties change logits, which also a greedy choice sees."""
        return bool(self.logit_bias) or self.has_penalty


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that may be chosen: `packed` (one bit a token, least significant first) or `allowed` ids."""

    packed: bytes | None = None
    allowed: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbabilities:
    """What another model drew a token from.

    Attributes:
        ids: [n] int64, ascending; None: all tokens of the vocabulary.
        probabilities: [n] float64, together 1.
    """

    ids: NDArray[np.int64] | None
    probabilities: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RowChoice:
    """How one row of a verify differs: a mask of its own, and what the next token was drawn from."""

    mask: TokenMask | None = None
    draft: DraftProbabilities | None = None


@dataclass(frozen=True, slots=True)
class HiddenSpec:
    """Which hidden states of a row are returned.

    Attributes:
        layers: As the transformers library counts them: 0 is the embedding, i what layer i leaves, the number
            of layers the last one, after the final norm. At least one.
        number_format: Of the answer.
    """

    layers: Sequence[int]
    number_format: LogitsFormat = LogitsFormat.F32


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What to compute and return for each wanted row. A token is always chosen."""

    logits: LogitsFormat | None = None
    top_logprobs: int = 0
    logprob_token_ids: Sequence[int] = ()
    logprob: bool = False
    sampling: Sampling | None = None
    mask: TokenMask | None = None
    # The log-probability of the chosen token in the distribution that it was drawn from.
    sampled_logprob: bool = False
    hidden: HiddenSpec | None = None

    @property
    def row_weight(self) -> int:
        """How many plain rows one of these counts for: what is read, copied and sent beside the choice.

        Logits of a vocabulary are hundreds of kilobytes, a hidden state is tens; lists as long as people read
        cost nothing extra.
        """
        lists = (self.top_logprobs + len(self.logprob_token_ids)) // _LISTED_PER_ROW
        layers = 0 if self.hidden is None else -(-len(self.hidden.layers) // _LAYERS_PER_ROW)
        return 1 + lists + layers + (0 if self.logits is None else _LOGITS_WEIGHT)


GREEDY = OutputSpec()


@dataclass(slots=True)
class RowOutput:
    """What one row of logits says about the token that follows it."""

    token_id: int
    logprob: float | None = None
    sampled_logprob: float | None = None
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    chosen_logprobs: Sequence[float] = ()
    # One row, little-endian, in the asked-for format.
    logits: bytes | None = None
    logits_format: LogitsFormat | None = None
    # One for each layer that was asked for, in that order; likewise.
    hidden: Sequence[bytes] = ()
    hidden_format: LogitsFormat | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Append `token_ids` to `sequence` at `position`: the one primitive.

    `rows` of its last tokens have an output: 0 none, 1 the last, len(token_ids) all. `scored` of its last
    tokens are answered with their log-probabilities behind those before them: all but the first can be.
    """

    op_id: int
    sequence: int
    position: int
    token_ids: Sequence[int]
    rows: int = 1
    output: OutputSpec = GREEDY
    accept: Accept = Accept.ALL
    kind: Kind = Kind.PREFILL
    # Operations of one caller queue behind each other. 0: a caller of its own.
    caller: int = 0
    prompt_len: int = 0
    ephemeral: bool = False
    # Of a sequence that begins: it shares pages with those of the same salt only.
    salt: bytes = b""
    priority: Priority = Priority.NORMAL
    # time.monotonic_ns() after which it is not started any more. None: no limit.
    deadline_ns: int | None = None
    arrived_ns: int = 0
    # The chosen token is expected to be appended next, with the same output: see `run_ahead`.
    run_ahead: bool = False
    scored: int = 0
    # One for each token, or empty.
    choices: Sequence[RowChoice] = ()
    # The tokens are a tree (`token_trees`), all of whose rows are wanted; empty: they follow each other.
    parents: Sequence[int] = ()
    # One more token is drawn for each from the last row, if that has an output.
    sample_seeds: Sequence[int] = ()

    # Of how many of the last tokens the row of logits is computed. The row before a token scores it.
    wanted_rows: int = field(init=False)
    # How many plain rows one of its rows counts for. A draw is only a part of what a row takes: all draws are
    # from the last row, and what they take is shared out among the rows, which may be scored.
    row_weight: int = field(init=False)

    def __post_init__(self) -> None:
        wanted_rows = max(self.rows, self.scored + 1) if self.scored else self.rows
        draws_weight = len(self.sample_seeds) // (_DRAWS_PER_ROW * max(1, wanted_rows))
        object.__setattr__(self, "wanted_rows", wanted_rows)
        object.__setattr__(self, "row_weight", self.output.row_weight + draws_weight)


@dataclass(frozen=True, slots=True)
class Fork:
    """Make `children` that share the pages of `sequence`."""

    op_id: int
    sequence: int
    children: Sequence[int]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut `sequence` to `new_len` tokens and free its pages."""

    op_id: int
    sequence: int
    new_len: int


@dataclass(frozen=True, slots=True)
class Release:
    """Forget sequences. Unknown ones are passed over."""

    op_id: int
    sequences: Sequence[int]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a forward that has not finished and roll its sequence back. It gets no answer then."""

    op_id: int
    target_op_id: int


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    """Answer once the commands before it are done; with `walk_pages`, check the pool's invariants too."""

    op_id: int
    walk_pages: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """What the gateway knows of a sequence: its first `length` tokens, and their digest (`keeping`)."""

    sequence: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Adopt:
    """Cut each claimed sequence to its length, and release those with other tokens and those not claimed."""

    op_id: int
    claims: Sequence[Claim]


Command = Forward | Fork | Truncate | Release | Abort | CheckIntegrity | Adopt


@dataclass(frozen=True, slots=True)
class StartOver:
    """Another stream begins, or none: roll back every forward, answer nothing asked before, say what is held.

    No command of a gateway's: it comes between those of one and of the next.
    """

    stream: int


class FailureReason(enum.Enum):
    """Why a command failed. Nothing of a failed command is applied."""

    KV_MISSING = enum.auto()
    KV_EXHAUSTED = enum.auto()
    FAULT = enum.auto()
    TIMEOUT = enum.auto()
    UNSUPPORTED = enum.auto()


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """A forward that was applied. `kept` tokens of it stay in the sequence."""

    op_id: int
    sequence: int
    outputs: Sequence[RowOutput]
    kept: int
    reused: int
    # Of the scored tokens: the log-probability, and whether no other token was more likely.
    token_logprobs: Sequence[float]
    token_is_argmax: Sequence[bool]
    queue_ns: int
    compute_ns: int
    steps: int
    batch_items: int
    # For each of `sample_seeds`, without lists and logits.
    samples: Sequence[RowOutput] = ()
    # Of a tree: the indexes of the tokens that stay.
    kept_path: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """A control command that was carried out."""

    op_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A command that was not carried out. `detail` is for logs, never for clients."""

    op_id: int
    reason: FailureReason
    detail: str = ""
    pages_needed: int = 0
    pages_available: int = 0


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """All commands before the request have been carried out. `intact` is None if no page was looked at."""

    op_id: int
    intact: bool | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """The answer to `StartOver`: (sequence, length) of all that are held. The stream's own answers follow."""

    stream: int
    sequences: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer to `Adopt`: the sequences that were kept."""

    op_id: int
    kept: Sequence[int]


Result = ForwardDone | Done | Failed | IntegrityReport | Holdings | Adopted
