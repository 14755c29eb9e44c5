"""Logits to tokens: the settings of `Sampling` and `TokenMask`, then a greedy or a random choice.

Every row is chosen alone: its token is a pure function of its logits, its settings, its seed and its
position, whatever else is in the batch and whatever was drawn before. Settings apply in the order of
types.proto. Where tokens tie, the lowest id comes first, in the choice and in every "most likely".

Numbers: logits are float32, and stay so after each of bias, repetition and frequency/presence penalty, which
are computed in float64 and rounded once; finite values stay finite. What follows is float64.

Not known here: where logits come from, the wire, and the ranges of settings (the gateway checks them; token
ids beyond the vocabulary are passed over, so that one row never takes the batch down with an index error).
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

# Log-weights below the best token's at which a superset of the top_p set is looked for, nearest first.
_TOP_P_CUTS = (3.0, 6.0, 9.0, 12.0)

# With so many draws from one row its tokens are sorted once: each race is then of the top_p set only.
_MANY_DRAWS = 16
# What sums in another order may differ by, relative to them, is far less.
_SUM_SLACK = 1e-9

# Racing fewer tokens than this, ruling some out beforehand costs more than it saves.
_SMALL_RACE = 2048
# Log-weights below the best token's of those that set the pace.
_RACE_HEAD = 4.0
# What rounding may do to a uniform number (float32) is far less.
_RACE_SLACK = 1e-6

# Logits that are worth a thread: a millisecond or so.
_LEAST_OF_A_THREAD = 1 << 17

Row = NDArray[np.float32]  # [V] logits
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that another model drew, each on its own, and what from. The first that can be kept is."""

    token_ids: Sequence[int]
    drawn_from: DraftProbabilities

    def of(self, token_ids: Ids) -> Reals:
        """[n] how likely each of these tokens was there."""
        ids, probabilities = self.drawn_from.ids, self.drawn_from.probabilities
        if ids is None:
            return probabilities[token_ids]
        at = np.minimum(np.searchsorted(ids, token_ids), len(ids) - 1)
        return np.where(ids[at] == token_ids, probabilities[at], 0.0)


class SamplingError(Exception):
    """No token can be chosen for some rows. Nothing was chosen for the others: call again without `rows`.

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
        position: of the chosen token in its sequence, which keys the draw.
        history: every token of the sequence before it; read only where a penalty is set. Rows of one
            forward share it, and it may go on beyond this one's.
        history_len: the tokens of `history` that are before it; None: all.
        draft: what stands there already, and what it was drawn from; `distribution` chooses then.
        path: the tokens between those of `history` and this one, which rows of a tree do not share.
        prompt_len: the tokens of `history` that frequency and presence penalties do not count.
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
        """The tokens before it."""
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
        BadLogitsError: names all unusable rows, whether or not their bad values would be chosen from.
        NothingAllowedError: names all rows without an allowed token, once no row has bad logits.
    """
    if logits.ndim != 2 or len(logits) != len(rows) or not logits.shape[1] or logits.dtype != torch.float32:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} for {len(rows)} rows")
    best, chosen = _most_likely(logits)
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
    """Whether the most likely token is chosen, whatever else is set."""
    spec = row.spec
    return row.mask is None and (spec is None or (spec.temperature <= 0 and not spec.changes_logits))


def _choose_others(logits: Tensor, rows: Sequence[SamplingRow], indexes: Sequence[int]) -> list[int | None]:
    """The tokens of rows that settings choose, in the order of `indexes`; None: nothing is allowed.

    A row of a large vocabulary takes milliseconds, in which numpy lets other threads run: several are chosen
    at once. A row's token does not depend on what is beside it.
    """
    return _in_threads(lambda part: _choose_some(logits, rows, part), indexes, logits.shape[1])


def _in_threads(
    work: Callable[[Sequence[int]], list[_Token]], items: Sequence[int], size: int
) -> list[_Token]:
    """What `work` makes of items that take so many logits each, in order. They may be worked on in parts."""
    # One item is never handed over: whoever works on it may be in a thread already.
    parts = min(torch.get_num_threads(), len(items), len(items) * size // _LEAST_OF_A_THREAD)
    if parts < 2:
        return work(items)
    # Neighbours stay together: they share masks and histories.
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
    """Logits after mask, bias and penalties: [V] float32; those that were given if there are none."""
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
    # Each block's maximum is some token's logit, so at least k tokens reach the k-th largest of the maxima.
    # Few more do: what is left to sort is small, and finding it reads the row once or twice.
    bound = np.float32(_NEG_INF)
    block = min(256, len(row) // (2 * k))
    if block >= 8:
        maxima = row[: len(row) // block * block].reshape(-1, block).max(axis=1)
        bound = np.partition(maxima, -k)[-k]
    ids = np.flatnonzero(row >= bound if bound > _NEG_INF else row > _NEG_INF)
    order = np.argsort(-row[ids], kind="stable")  # stable: ids ascend, and stay so among equals
    return ids[order[:k]]


def _most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, NaN above all, and the lowest id that has it: [R] and [R] int64."""
    if logits.device.type != "cpu":
        best, ids = logits.max(dim=-1)
        return best, ids
    # As torch promises, numpy returns the first of equals; it is ten times as fast, being vectorised.
    ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1), ids


def _choose_one(adjusted: Row, row: SamplingRow, spec: Sampling) -> int | None:
    """The token of one row after mask, bias and penalties; None where nothing is allowed."""
    token = int(adjusted.argmax())
    best = float(adjusted[token])
    if not math.isfinite(best):
        return None
    if spec.temperature <= 0:
        return token
    (token,) = Race(adjusted, best, spec, 1).draw((mix_key(spec.seed, row.position),))
    return token


def _adjusted(row: Row, spec: Sampling, history: TokenCounts | None) -> Row:
    """A copy of row with logit_bias and penalties applied. Only the tokens they name are touched."""
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
    """Set row[ids], rounded to float32. Forbidden tokens stay forbidden, finite values stay finite."""
    finite = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
    row[ids] = np.where(row[ids] == _NEG_INF, row[ids], finite)


class _Candidates(NamedTuple):
    """Tokens still in the race, and their log-weights relative to the best token's."""

    ids: Ids  # [n], ascending
    log_weights: Reals  # [n]

    def take(self, index: Ids) -> _Candidates:
        return _Candidates(self.ids[index], self.log_weights[index])


class Race:
    """Draws from the softmax of a row (largest value: `best`), cut by top_k, top_p and min_p.

    top_p needs no sorted vocabulary. The race is run over a superset of the top_p set; if its winner is in
    the set (the tokens before it weigh less than p), it is the set's winner too. If not, no token from the
    winner down is in the set, and the race is run again over those above.
    """

    def __init__(self, row: Row, best: float, spec: Sampling, draws: int) -> None:
        """`draws`: how many are expected; for many it is worth it to rule tokens out beforehand."""
        top_k = 0 < spec.top_k < len(row)
        ids = np.sort(best_k(row, spec.top_k)) if top_k else np.arange(len(row))
        log_weights = row[ids].astype(np.float64) if top_k else row.astype(np.float64)
        log_weights -= best
        log_weights /= spec.temperature
        runners = _Candidates(ids, log_weights)

        self._limit = math.inf
        if spec.top_p < 1.0:
            weights = np.exp(log_weights)
            self._limit = spec.top_p * float(weights.sum())
            for cut in _TOP_P_CUTS:
                near = np.flatnonzero(log_weights >= -cut)
                if weights[near].sum() >= self._limit:
                    runners = runners.take(near)
                    break
        if spec.min_p > 0.0:
            runners = runners.take(np.flatnonzero(np.exp(runners.log_weights) >= spec.min_p))
        if draws >= _MANY_DRAWS:
            runners = _that_can_win(runners, self._limit)
        self._runners = runners

    @property
    def size(self) -> int:
        """How many tokens take part: what one draw costs."""
        return len(self._runners.ids)

    def draw(self, keys: Sequence[int]) -> list[int]:
        """The winner for each key."""
        return _in_threads(
            lambda part: [_winner(self._runners, self._limit, key) for key in part], keys, self.size
        )


def _that_can_win(runners: _Candidates, limit: float) -> _Candidates:
    """Those that are not forbidden and, but for rounding, among the most likely that reach `limit`."""
    if limit == math.inf:
        return runners.take(np.flatnonzero(runners.log_weights > _NEG_INF))
    order = np.argsort(-runners.log_weights, kind="stable")  # stable: ids ascend, and stay so among equals
    order = order[: np.count_nonzero(runners.log_weights > _NEG_INF)]
    # [n] what a token and all before it weigh; in the set are those before which less than `limit` is.
    reached = np.cumsum(np.exp(runners.log_weights[order]))
    count = 1 + int(np.searchsorted(reached[:-1], limit * (1 + _SUM_SLACK)))
    return runners.take(np.sort(order[:count]))


def _winner(runners: _Candidates, limit: float, key: int) -> int:
    """The winner among those that, from the best on, weigh less than `limit` together."""
    while True:
        token, log_weight = _race(runners, key)
        if limit == math.inf:
            return token
        before = runners.log_weights > log_weight
        before |= (runners.log_weights == log_weight) & (runners.ids < token)
        above = runners.take(np.flatnonzero(before))
        if len(above.ids) == 0 or np.exp(above.log_weights).sum() < limit:
            return token
        runners = above


def _race(runners: _Candidates, key: int) -> tuple[int, float]:
    """The id and log-weight of the runner with the largest log-weight + gumbel.

    What takes time is the noise's logarithms. No log-weight is above 0: once some token has a score, only
    those with at least as much noise can beat it, which their uniform numbers tell.
    """
    uniforms = uniform(key, runners.ids)
    if len(runners.ids) > _SMALL_RACE:
        head = np.flatnonzero(runners.log_weights >= -_RACE_HEAD)[:_SMALL_RACE]
        leader = float((runners.log_weights[head] + gumbel_of(uniforms[head])).max(initial=_NEG_INF))
        near = np.flatnonzero(uniforms <= uniform_of(leader) * (1 + _RACE_SLACK))
        runners, uniforms = runners.take(near), uniforms[near]
    winner = (runners.log_weights + gumbel_of(uniforms)).argmax()
    return int(runners.ids[winner]), float(runners.log_weights[winner])
