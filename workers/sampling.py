"""Chooses tokens from logits: the settings of `Sampling` and `TokenMask`, then a greedy or random choice.

Each row is chosen independently. Its token is a pure function of its logits, settings, seed and position. It
does not depend on the rest of the batch or on earlier draws. Settings apply in the order of types.proto.
Among equal logits the lowest id comes first, in the choice and in every "most likely".

Numbers: logits are float32. Bias, repetition penalty and frequency/presence penalty are each computed in
float64 and rounded once to float32; finite values stay finite. All later steps use float64.

The gateway checks the ranges of settings. Token ids beyond the vocabulary are ignored here, so that one row
cannot make the batch fail with an index error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.counter_rng import gumbel_of, mix_key, uniform, uniform_of
from workers.logit_settings import HistoryCounter, Ids, Masks, TokenCounts, in_vocabulary
from workers.operations import DraftProbabilities, Sampling, TokenMask

_Token = TypeVar("_Token", int, int | None)

_NEG_INF = float("-inf")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_GREEDY = Sampling()

# Distances below the best log-weight that are tried for a superset of the top_p set, smallest first.
_TOP_P_CUTS = (3.0, 6.0, 9.0, 12.0)

# For at least so many draws from one row, its tokens are sorted once to find the top_p set.
_MANY_DRAWS = 16
# Far more than the relative difference of sums in another order.
_SUM_SLACK = 1e-9

# With fewer candidates, pruning costs more than it saves.
_MIN_PRUNED = 2048
# Tokens within this distance of the best log-weight determine the score that others have to reach.
_HEAD_WEIGHT = 4.0
# Far more than the rounding error of a uniform number (float32).
_UNIFORM_SLACK = 1e-6

# The least logits for another thread: about a millisecond of work.
_MIN_LOGITS_PER_THREAD = 1 << 17

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


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the token of one row is chosen.

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
    if logits.ndim != 2 or len(logits) != len(rows) or not logits.shape[1] or logits.dtype != torch.float32:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} for {len(rows)} rows")
    best, chosen = _argmax_rows(logits)
    finite = best.isfinite()
    if not finite.all():
        raise BadLogitsError((~finite).nonzero().flatten().tolist())

    others = [index for index, row in enumerate(rows) if not _is_greedy(row)]
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
    """The tokens of rows that are not greedy, in the order of `indexes`. None: nothing is allowed.

    A large vocabulary takes milliseconds for each row. numpy releases the GIL, so threads choose in parallel.
    """
    return _in_threads(lambda part: _choose_some(logits, rows, part), indexes, logits.shape[1])


def _in_threads(
    work: Callable[[Sequence[int]], list[_Token]], items: Sequence[int], size: int
) -> list[_Token]:
    """The results of `work` for items of `size` logits each, in order. Several threads may each do a part."""
    # A single item stays in this thread, which may be one of the pool's: so nested calls cannot deadlock.
    parts = min(torch.get_num_threads(), len(items), len(items) * size // _MIN_LOGITS_PER_THREAD)
    if parts < 2:
        return work(items)
    # Contiguous parts: neighbours share masks and histories.
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    some = [items[first:end] for first, end in itertools.pairwise(cuts)]
    return list(itertools.chain.from_iterable(_threads(parts).map(work, some)))


def _choose_some(logits: Tensor, rows: Sequence[SamplingRow], indexes: Sequence[int]) -> list[int | None]:
    masks, counter = Masks(logits.shape[1]), HistoryCounter(logits.shape[1])
    return [
        _choose_one(
            adjusted(logits[index].cpu().numpy(), rows[index], masks, counter),
            rows[index],
            rows[index].spec or _GREEDY,
        )
        for index in indexes
    ]


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="sampling")


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


def _argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row (NaN counts as largest), and its lowest id: [R] and [R] int64."""
    if logits.device.type != "cpu":
        best, ids = logits.max(dim=-1)
        return best, ids
    # Like torch, numpy returns the first of equal values; it is ten times as fast, because it is vectorised.
    ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1), ids


def _choose_one(adjusted: Row, row: SamplingRow, spec: Sampling) -> int | None:
    """The token of one row after mask, bias and penalties. None: nothing is allowed."""
    token = int(adjusted.argmax())
    best = float(adjusted[token])
    if not math.isfinite(best):
        return None
    if spec.temperature <= 0:
        return token
    (token,) = GumbelSampler(adjusted, best, spec, 1).draw((mix_key(spec.seed, row.position),))
    return token


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


class _Candidates(NamedTuple):
    """Tokens that may be drawn, and their log-weights relative to the best token's."""

    ids: Ids  # [n], ascending
    log_weights: Reals  # [n]

    def take(self, index: Ids) -> _Candidates:
        return _Candidates(self.ids[index], self.log_weights[index])


class GumbelSampler:
    """Draws from the softmax of a row (largest value: `best`), restricted by top_k, top_p and min_p.

    A draw is the argmax of log-weight + Gumbel noise. top_p needs no sorting: the argmax is taken over a
    superset of the top_p set. If the more likely tokens weigh less than p, the argmax is in the set. If not,
    no token from it down is in the set, and the argmax is taken again over the tokens above.
    """

    def __init__(self, row: Row, best: float, spec: Sampling, draws: int) -> None:
        """`draws`: how many are expected. For many draws impossible tokens are removed first."""
        top_k = 0 < spec.top_k < len(row)
        ids = np.sort(best_k(row, spec.top_k)) if top_k else np.arange(len(row))
        log_weights = row[ids].astype(np.float64) if top_k else row.astype(np.float64)
        log_weights -= best
        log_weights /= spec.temperature
        candidates = _Candidates(ids, log_weights)

        self._top_p_mass = math.inf
        if spec.top_p < 1.0:
            weights = np.exp(log_weights)
            self._top_p_mass = spec.top_p * float(weights.sum())
            for cut in _TOP_P_CUTS:
                near = np.flatnonzero(log_weights >= -cut)
                if weights[near].sum() >= self._top_p_mass:
                    candidates = candidates.take(near)
                    break
        if spec.min_p > 0.0:
            candidates = candidates.take(np.flatnonzero(np.exp(candidates.log_weights) >= spec.min_p))
        if draws >= _MANY_DRAWS:
            candidates = _drop_impossible(candidates, self._top_p_mass)
        self._candidates = candidates

    @property
    def size(self) -> int:
        """The number of candidates, which is the cost of a draw."""
        return len(self._candidates.ids)

    def draw(self, keys: Sequence[int]) -> list[int]:
        """The token drawn with each key."""
        return _in_threads(
            lambda part: [_draw_one(self._candidates, self._top_p_mass, key) for key in part], keys, self.size
        )


def _drop_impossible(candidates: _Candidates, limit: float) -> _Candidates:
    """The candidates that can be drawn: not forbidden, and, up to rounding, in the top_p set of `limit`."""
    if limit == math.inf:
        return candidates.take(np.flatnonzero(candidates.log_weights > _NEG_INF))
    order = np.argsort(-candidates.log_weights, kind="stable")  # stable: ids stay ascending among equals
    order = order[: np.count_nonzero(candidates.log_weights > _NEG_INF)]
    # [n] the weight of a token and all before it. The set has the tokens before which is less than `limit`.
    reached = np.cumsum(np.exp(candidates.log_weights[order]))
    count = 1 + int(np.searchsorted(reached[:-1], limit * (1 + _SUM_SLACK)))
    return candidates.take(np.sort(order[:count]))


def _draw_one(candidates: _Candidates, limit: float, key: int) -> int:
    """A draw from the most likely tokens that together reach the weight `limit`."""
    while True:
        token, log_weight = _gumbel_argmax(candidates, key)
        if limit == math.inf:
            return token
        before = candidates.log_weights > log_weight
        before |= (candidates.log_weights == log_weight) & (candidates.ids < token)
        above = candidates.take(np.flatnonzero(before))
        if len(above.ids) == 0 or np.exp(above.log_weights).sum() < limit:
            return token
        candidates = above


def _gumbel_argmax(candidates: _Candidates, key: int) -> tuple[int, float]:
    """The id and log-weight of the candidate with the largest log-weight + gumbel.

    The logarithms of the noise take most of the time. No log-weight is above 0: so only tokens whose noise is
    at least the best score so far can exceed it. Their uniform numbers show this without a logarithm.
    """
    uniforms = uniform(key, candidates.ids)
    if len(candidates.ids) > _MIN_PRUNED:
        head = np.flatnonzero(candidates.log_weights >= -_HEAD_WEIGHT)[:_MIN_PRUNED]
        best_score = float((candidates.log_weights[head] + gumbel_of(uniforms[head])).max(initial=_NEG_INF))
        near = np.flatnonzero(uniforms <= uniform_of(best_score) * (1 + _UNIFORM_SLACK))
        candidates, uniforms = candidates.take(near), uniforms[near]
    best = (candidates.log_weights + gumbel_of(uniforms)).argmax()
    return int(candidates.ids[best]), float(candidates.log_weights[best])
