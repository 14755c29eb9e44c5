"""Chooses tokens from logits: the settings of `Sampling` and `TokenMask`, then a greedy or random choice.

Each row is chosen independently. Its token is a pure function of its logits, settings, seed and position. It
does not depend on the rest of the batch or on earlier draws. Settings apply in the order of types.proto.
Among equal logits the lowest id comes first, in the choice and in every "most likely".

On the CPU one compiled call chooses for all rows; numpy does it, row by row, where nothing is compiled.

Numbers: logits are float32. Bias, repetition penalty and frequency/presence penalty are each computed in
float64 and rounded once to float32; finite values stay finite. All later steps use float64.

The gateway checks the ranges of settings. Token ids beyond the vocabulary are ignored here, so that one row
cannot make the batch fail with an index error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu import sampling as compiled
from workers.counter_rng import gumbel, mix_key
from workers.logit_settings import HistoryCounter, Ids, Masks, TokenCounts, in_vocabulary
from workers.operations import DraftProbabilities, Sampling, TokenMask

_NEG_INF = float("-inf")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_GREEDY = Sampling()
_limits_of = operator.attrgetter(*compiled.LIMITS)

Row = NDArray[np.float32]  # [V] logits
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draft:
    """Independent draws of another model, and their distribution. The first acceptable one is kept."""

    token_ids: Sequence[int]
    drawn_from: DraftProbabilities

    def of(self, token_ids: Ids) -> Reals:
        """[n] the probability of each of these tokens in that distribution."""
        ids, probabilities = self.drawn_from.ids, self.drawn_from.probabilities
        if ids is None:
            return probabilities[token_ids]
        at = np.minimum(np.searchsorted(ids, token_ids), len(ids) - 1)
        return np.where(ids[at] == token_ids, probabilities[at], 0.0)


class SamplingError(Exception):
    """No token can be chosen for some rows. To choose for the others, call again without `rows`.

    SamplingError
    ├── BadLogitsError       (also a FloatingPointError): the model's logits are unusable
    └── NothingAllowedError  (also a ValueError): mask and logit_bias leave no token
    """

    what: ClassVar[str]

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"{self.what}: row {', '.join(map(str, rows))}")
        self.rows = tuple(rows)


class BadLogitsError(SamplingError, FloatingPointError):
    """NaN or +infinity somewhere in a row, or -infinity everywhere."""

    what = "logits with NaN, +infinity or nothing but -infinity"


class NothingAllowedError(SamplingError, ValueError):
    """A row's mask and logit_bias forbid every token the model allows."""

    what = "mask and logit_bias forbid every token"


@dataclass(slots=True)
class SamplingRow:
    """How the token of one row is chosen. Not modified; to make frozen ones takes five times as long.

    Attributes:
        spec: None is greedy.
        mask: None allows every token.
        position: of the chosen token in its sequence; it determines the draw.
        history: the tokens of the sequence before it; only used for penalties. Rows of one forward share it,
            so it may contain later tokens too.
        history_len: how many tokens of `history` are before it; None: all.
        draft: the drafts for this position; `distribution` chooses then.
        path: the tokens between `history` and this one, in a token tree.
        prompt_len: how many tokens of `history` frequency and presence penalties do not count.
    """

    spec: Sampling | None = None
    mask: TokenMask | None = None
    position: int = 0
    history: Sequence[int] | Ids = ()
    prompt_len: int = 0
    history_len: int | None = None
    draft: Draft | None = None
    path: Sequence[int] = ()

    def counts(self, counter: HistoryCounter) -> TokenCounts:
        """Counts the tokens before it."""
        return counter.count(self.history, self.prompt_len, self.history_len, self.path)


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose one token for each row.

    Args:
        logits: [R, V] float32, any device, V >= 1. Not modified.
        rows: R of them.

    Returns:
        [R] int64 on the device of `logits`.

    Raises:
        ValueError: shapes or dtype do not fit.
        BadLogitsError: for all rows with bad values, also if a mask excludes them.
        NothingAllowedError: for all rows without an allowed token, if no row has bad logits.
    """
    shape = logits.shape
    if len(shape) != 2 or shape[0] != len(rows) or not shape[1] or logits.dtype != torch.float32:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} for {len(rows)} rows")
    chosen, bad = _argmax_rows(logits)
    if bad:
        raise BadLogitsError(bad)

    # Most rows have no settings, which saves a call for each.
    others = [
        index
        for index, row in enumerate(rows)
        if not (row.spec is None and row.mask is None) and not _is_greedy(row)
    ]
    if not others:
        return chosen
    found = _choose_others(logits, rows, others)
    forbidden = [index for index, token in zip(others, found, strict=True) if token is None]
    if forbidden:
        raise NothingAllowedError(forbidden)
    chosen[torch.tensor(others, device=logits.device)] = torch.tensor(found, device=logits.device)
    return chosen


def _is_greedy(row: SamplingRow) -> bool:
    """Whether the row's choice is the largest logit of the model."""
    spec = row.spec
    return row.mask is None and (spec is None or (spec.temperature <= 0 and not spec.changes_logits))


def _choose_others(logits: Tensor, rows: Sequence[SamplingRow], indexes: Sequence[int]) -> list[int | None]:
    """The tokens of rows that are not greedy, in the order of `indexes`. None: nothing is allowed."""
    vocab = logits.shape[1]
    if not compiled.available():
        masks, counter = Masks(vocab), HistoryCounter(vocab)
        return [
            _choose_one(adjusted(logits[index].cpu().numpy(), rows[index], masks, counter), rows[index])
            for index in indexes
        ]
    known, choices = CompiledRows(vocab), dict[int, compiled.RowChoice]()
    for index in indexes:
        row, choice = rows[index], known.choice(rows[index])
        choice.keys = keys_of([0 if row.spec is None else row.spec.seed], row.position)
        if row.draft is not None:
            choice.temperature = 0.0  # `distribution` chooses; here any allowed token will do
        choices[index] = choice
    compiled.choose(on_host(logits), choices)
    return [int(choice.tokens[0]) if choice.candidates else None for choice in choices.values()]


def adjusted(logits: Row, row: SamplingRow, masks: Masks, counter: HistoryCounter) -> Row:
    """Logits after mask, bias and penalties: [V] float32. Returns `logits` itself if none is set."""
    spec = row.spec or _GREEDY
    values = logits
    if row.mask is not None:
        values = np.where(masks.allowed(row.mask), values, np.float32(_NEG_INF))
    if spec.changes_logits:
        values = _adjusted(values, spec, row.counts(counter) if spec.has_penalty else None)
    return values


def best_k(row: Row, k: int) -> Ids:
    """The k tokens with the largest logits, largest first, the lower id first among equals.

    Args:
        row: [V] without NaN. Not modified.
        k: at least 1.

    Returns:
        At most k ids: tokens with a logit of -infinity are left out.
    """
    # The row is divided into groups. At least k tokens reach the k-th largest of the groups' maxima, and few
    # more do: so there is little to sort, and finding it reads the row once or twice.
    bound = np.float32(_NEG_INF)
    group = min(256, len(row) // (2 * k))
    if group >= 8:
        maxima = row[: len(row) // group * group].reshape(-1, group).max(axis=1)
        bound = np.partition(maxima, -k)[-k]
    ids = np.flatnonzero(row >= bound if bound > _NEG_INF else row > _NEG_INF)
    order = np.argsort(-row[ids], kind="stable")  # stable: ids stay ascending among equal logits
    return ids[order[:k]]


def _argmax_rows(logits: Tensor) -> tuple[Tensor, list[int]]:
    """The lowest id of the largest logit of each row: [R] int64. And the rows where that is not finite.

    NaN counts as the largest.
    """
    if logits.device.type != "cpu":
        best, ids = logits.max(dim=-1)
        return ids, (~best.isfinite()).nonzero().flatten().tolist()
    # Like torch, numpy returns the first of equal values; it is ten times as fast, because it is vectorised.
    values = logits.numpy()
    first = values.argmax(axis=1)
    best_of_rows = values[np.arange(len(values)), first].tolist()
    return torch.from_numpy(first), [row for row, best in enumerate(best_of_rows) if not math.isfinite(best)]


def _choose_one(adjusted: Row, row: SamplingRow) -> int | None:
    """The token of one row after mask, bias and penalties. None: nothing is allowed."""
    if not math.isfinite(adjusted.max()):
        return None
    spec = row.spec or _GREEDY
    return candidates(adjusted, spec).draw(mix_key(spec.seed, row.position))


def _adjusted(row: Row, spec: Sampling, history: TokenCounts | None) -> Row:
    """A copy of row with logit_bias and penalties applied. Only the tokens they name change."""
    row = row.copy()
    if spec.logit_bias:
        ids = in_vocabulary(spec.logit_bias, len(row))
        bias = _column(spec.logit_bias, ids)
        _store(row, ids, row[ids] + bias)
        row[ids[bias == _NEG_INF]] = _NEG_INF
    if history is None:
        return row
    if spec.repetition_penalty != 1.0:
        values = row[history.ids].astype(np.float64)
        penalty = spec.repetition_penalty
        _store(row, history.ids, np.where(values > 0, values / penalty, values * penalty))
    if spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0:
        recent = history.recent > 0
        ids, counts = history.ids[recent], history.recent[recent]
        _store(row, ids, row[ids] - (counts * spec.frequency_penalty + spec.presence_penalty))
    return row


def _column(table: Mapping[int, float], ids: Ids) -> Reals:
    return np.array([table[i] for i in ids.tolist()], dtype=np.float64)


def _store(row: Row, ids: Ids, values: Reals) -> None:
    """Set row[ids], rounded to float32. Values of -infinity and finite values stay such."""
    finite = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
    row[ids] = np.where(row[ids] == _NEG_INF, row[ids], finite)


class Candidates(NamedTuple):
    """Tokens that can be drawn, and their log-weights relative to the best token's."""

    ids: Ids  # [n], ascending
    log_weights: Reals  # [n]

    def draw(self, key: int) -> int:
        """The token with the largest log-weight + Gumbel noise."""
        return int(self.ids[(self.log_weights + gumbel(key, self.ids)).argmax()])


def candidates(row: Row, spec: Sampling) -> Candidates:
    """What is left of a row by temperature and `operations.LIMITS`.

    Args:
        row: [V] float32 after mask, bias and penalties, of which one is finite. Not modified.
        spec: Without a temperature only the most likely token is left.
    """
    best = int(row.argmax())
    if spec.temperature <= 0:
        return Candidates(np.array([best]), np.zeros(1))
    ids = np.flatnonzero(row > _NEG_INF)
    if 0 < spec.top_k < len(ids):
        ids = np.sort(best_k(row, spec.top_k))
    log_weights = (row[ids].astype(np.float64) - float(row[best])) / spec.temperature
    kept = np.ones(len(ids), dtype=np.bool_)
    if spec.top_p < 1.0:
        # The weight of the tokens before each: the set has those before which is less than top_p.
        order = np.argsort(-row[ids], kind="stable")  # stable: ids stay ascending among equals
        weights = np.exp(log_weights[order])
        kept[order[1:]] = np.cumsum(weights)[:-1] < spec.top_p * weights.sum()
    if spec.min_p > 0.0:
        kept &= np.exp(log_weights) >= spec.min_p
    if spec.typical_p < 1.0:
        # How far each token's information is from the entropy: both lack the logarithm of the total.
        weights = np.where(kept, np.exp(log_weights), 0.0)
        distances = np.abs(log_weights - (weights * log_weights).sum() / weights.sum())
        nearest = np.flatnonzero(kept)[np.argsort(distances[kept], kind="stable")]
        is_short = np.cumsum(weights[nearest]) < spec.typical_p * weights.sum()
        kept &= distances <= distances[nearest[: np.count_nonzero(is_short) + 1]].max()
    return Candidates(ids[kept], log_weights[kept])


class CompiledRows:
    """Describes rows of one step to the compiled kernel. What rows share is decoded once."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._masks = Masks(vocab)
        # By id, valid as long as the history is kept here.
        self._histories: dict[int, tuple[object, Ids]] = {}

    def choice(self, row: SamplingRow) -> compiled.RowChoice:
        """The row's settings. The caller adds `keys` or `tokens`, drafts, and what it wants."""
        spec = row.spec or _GREEDY
        choice = compiled.RowChoice(
            temperature=spec.temperature,
            limits=_limits_of(spec),
            repetition_penalty=spec.repetition_penalty,
            frequency_penalty=spec.frequency_penalty,
            presence_penalty=spec.presence_penalty,
            mask=None if row.mask is None else self._masks.packed(row.mask),
        )
        if spec.logit_bias:
            choice.biased = in_vocabulary(spec.logit_bias, self._vocab)
            choice.bias = _column(spec.logit_bias, choice.biased)
        if spec.has_penalty:
            choice.history, choice.path = self._history(row.history), np.array(row.path, dtype=np.int64)
            choice.history_len = len(row.history) if row.history_len is None else row.history_len
            choice.prompt_len = row.prompt_len
        return choice

    def _history(self, history: Sequence[int] | Ids) -> Ids:
        known = self._histories.get(id(history))
        if known is None:
            ids = np.ascontiguousarray(history, dtype=np.int64)
            known = self._histories[id(history)] = history, ids
        return known[1]


def on_host(logits: Tensor) -> Tensor:
    """[R, V] as compiled code reads it. Copies only what is not so."""
    return logits.float().cpu().contiguous()


def keys_of(seeds: Iterable[int], position: int) -> NDArray[np.uint64]:
    """The keys of draws with these seeds."""
    return np.array([mix_key(seed, position) for seed in seeds], dtype=np.uint64)
