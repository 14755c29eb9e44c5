"""The settings of a row of logits, which say how its token is chosen and what is returned; and the result.

Plain data. `Forward` and `Decodes` have these settings, and get a `RowOutput` for each row with an output.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# See `OutputSpec.row_weight`.
_LOGITS_WEIGHT, _LISTED_PER_ROW, _LAYERS_PER_ROW = 3, 512, 4


class DataType(enum.Enum):
    """Number format of returned logits, and of hidden states."""

    F32 = enum.auto()
    BF16 = enum.auto()
    F16 = enum.auto()


# The settings that exclude tokens from a draw, in the order in which they are applied. Kernels take the order
# from here, or refer to it. A GPU gets a column of each.
FILTERS = ("top_k", "top_p", "min_p", "typical_p")
filters_of = operator.attrgetter(*FILTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen from a row of logits; the defaults have no effect (greedy).

    Applied in this order: mask and logit_bias, penalties, temperature, FILTERS, draw. The draw is a pure
    function of (seed, position).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    # Frequency and presence penalties count tokens from this position on. None: from the end of the prompt.
    penalty_from: int | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty is set, which needs the tokens of the sequence."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def is_filtered(self) -> bool:
        """Whether FILTERS may exclude tokens. They never exclude all."""
        return self.temperature > 0 and filters_of(self) != _NO_FILTERS

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties change logits. They also affect a greedy choice."""
        return bool(self.logit_bias) or self.has_penalty


_NO_FILTERS = filters_of(Sampling())


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that may be chosen: `packed` (a bit per token, least significant first) or `allowed` ids."""

    packed: bytes | None = None
    allowed: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbabilities:
    """The distribution from which a draft token was drawn.

    Attributes:
        ids: [n] int64, ascending; None: all tokens of the vocabulary.
        probabilities: [n] float64, whose sum is 1.
    """

    ids: NDArray[np.int64] | None
    probabilities: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRow:
    """The settings of one row of a verify: its mask, and the distribution of the next draft."""

    mask: TokenMask | None = None
    draft: DraftProbabilities | None = None


@dataclass(frozen=True, slots=True)
class HiddenSpec:
    """Which hidden states of a row are returned.

    Attributes:
        layers: Numbered as in the transformers library: 0 is the embedding, i the output of layer i, and the
            number of layers the last one's after the final norm. At least one.
        number_format: The format in which they are returned.
        mean: Return the mean over the forward's tokens up to the row. Then the rows of all tokens are
            computed.
    """

    layers: Sequence[int]
    number_format: DataType = DataType.F32
    mean: bool = False


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What to compute and return for each wanted row. A token is always chosen."""

    logits: DataType | None = None
    top_logprobs: int = 0
    logprob_token_ids: Sequence[int] = ()
    logprob: bool = False
    sampling: Sampling | None = None
    mask: TokenMask | None = None
    # The logprob of the chosen token in the distribution that it was drawn from.
    sampled_logprob: bool = False
    hidden: HiddenSpec | None = None
    experts: bool = False
    # The entropy of the model's own distribution.
    entropy: bool = False
    # Nothing is prelaunched after one of these tokens.
    end_token_ids: frozenset[int] = frozenset()

    # The cost of such a row, in plain rows, by the data that is read, copied and sent. A row of logits has
    # hundreds of kilobytes, a hidden state tens. Short lists are free.
    row_weight: int = field(init=False, repr=False, compare=False)
    # Whether a decode with these settings is plain: see `decodes`. Its row costs no more than any other.
    is_plain: bool = field(init=False, repr=False, compare=False)
    # Whether choosing the next token needs the tokens of the sequence.
    needs_history: bool = field(init=False, repr=False, compare=False)
    # Whether only the chosen token is returned.
    is_token_only: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lists = (self.top_logprobs + len(self.logprob_token_ids)) // _LISTED_PER_ROW
        layers = 0 if self.hidden is None else -(-len(self.hidden.layers) // _LAYERS_PER_ROW)
        weight = 1 + lists + layers + (0 if self.logits is None else _LOGITS_WEIGHT)
        object.__setattr__(self, "row_weight", weight)
        needs_more = self.hidden is not None or self.experts
        needs_history = self.sampling is not None and self.sampling.has_penalty
        object.__setattr__(self, "needs_history", needs_history)
        object.__setattr__(self, "is_plain", weight == 1)
        wants_logprobs = self.top_logprobs or self.logprob_token_ids or self.logprob or self.sampled_logprob
        wants = wants_logprobs or self.entropy
        object.__setattr__(self, "is_token_only", not (wants or needs_more) and self.logits is None)


GREEDY = OutputSpec()


# Without slots, so that fields which are no arguments cost nothing until they are set.
@dataclass
class RowOutput:
    """The results of one row of logits: the chosen token, and what else was requested."""

    token_id: int
    logprob: float | None = field(default=None, init=False)
    sampled_logprob: float | None = field(default=None, init=False)
    top_ids: Sequence[int] = field(default=(), init=False)
    top_logprobs: Sequence[float] = field(default=(), init=False)
    chosen_logprobs: Sequence[float] = field(default=(), init=False)
    # One row, little-endian, in the requested format.
    logits: bytes | None = field(default=None, init=False)
    logits_format: DataType | None = field(default=None, init=False)
    # One row for each requested layer, in the requested order and format.
    hidden: Sequence[bytes] = field(default=(), init=False)
    hidden_format: DataType | None = field(default=None, init=False)
    # For a mean, until they are summed: the row's own states, one [hidden size] for each requested layer.
    states: Sequence[NDArray[np.float32]] = field(default=(), init=False)
    # See StepOutput in types.proto.
    experts: bytes = field(default=b"", init=False)
    entropy: float | None = field(default=None, init=False)
