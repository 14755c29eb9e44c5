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

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from workers.counter_rng import GUMBEL_MAX, gumbel, mix_key
from workers.operations import Sampling, TokenMask

_NEG_INF = float("-inf")
_FLOAT32_MAX = torch.finfo(torch.float32).max
_DEFAULT = Sampling()

# torch's argmax and topk walk element by element, its amax in vectors: 10x faster over a vocabulary. So
# searches look at the maxima of blocks first, and then into the few blocks that matter.
_BLOCK = 256

# log-weights below the best token's at which a superset of the top_p set is looked for, nearest first.
_TOP_P_CUTS = (6.0, 12.0)

# Racing fewer tokens than this, ruling some out beforehand costs more than it saves.
_SMALL_RACE = 2048
_RACE_HEAD = 4.0


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
        history: every token of the sequence before it; read only where a penalty is set.
        prompt_len: the tokens of `history` that frequency and presence penalties do not count.
    """

    spec: Sampling | None = None
    mask: TokenMask | None = None
    position: int = 0
    history: Sequence[int] = ()
    prompt_len: int = 0


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
    best, chosen = best_tokens(logits)
    finite = best.isfinite()
    if not finite.all():
        raise BadLogitsError((~finite).nonzero().flatten().tolist())

    chosen_ids: dict[int, int] = {}
    forbidden: list[int] = []
    for index, row in enumerate(rows):
        spec = row.spec or _DEFAULT
        if row.mask is None and spec.temperature <= 0 and not _changes_logits(spec):
            continue
        token = _choose_one(logits[index], row, spec)
        if token is None:
            forbidden.append(index)
        else:
            chosen_ids[index] = token
    if forbidden:
        raise NothingAllowedError(forbidden)
    if chosen_ids:
        where = torch.tensor(list(chosen_ids), device=logits.device)
        chosen[where] = torch.tensor(list(chosen_ids.values()), device=logits.device)
    return chosen


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the lowest id that has it; NaN counts as the largest, as in torch.

    Args:
        logits: [R, V] floating point, V >= 1.

    Returns:
        [R] values and [R] int64 ids: what `logits.max(dim=-1)` returns.
    """
    best, block = _block_maxima(logits).max(dim=-1)
    start = block * _BLOCK
    columns = start.unsqueeze(1) + torch.arange(_BLOCK, device=logits.device)  # [R, _BLOCK]
    # The last block may be short. Repeating the last token is harmless: the first of equals wins.
    columns.clamp_(max=logits.shape[1] - 1)
    return best, start + logits.gather(1, columns).argmax(dim=-1)


def best_k(row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of one row, largest first, the lower id first among equals.

    Args:
        row: [V] floating point without NaN.
        k: at least 1; cut to V.

    Returns:
        [k] values and [k] int64 ids.
    """
    vocab = row.shape[0]
    k = min(k, vocab)
    maxima = _block_maxima(row.unsqueeze(0))[0]  # [B]
    values, ids = row, None
    if 4 * k <= maxima.shape[0]:
        # k blocks reach `bound`, so the k best tokens do too, and lie in blocks that do.
        bound = maxima.topk(k).values[-1]
        blocks = (maxima >= bound).nonzero()  # [b, 1]
        ids = (blocks * _BLOCK + torch.arange(_BLOCK, device=row.device)).flatten()
        ids = ids[ids < vocab]
        values = row[ids]
    smallest = values.topk(k).values[-1]
    above = (values > smallest).nonzero().flatten()
    equal = (values == smallest).nonzero().flatten()[: k - above.shape[0]]
    kept = torch.cat((above, equal))  # ids ascend among equals, and a stable sort leaves them so
    kept = kept[values[kept].sort(descending=True, stable=True).indices]
    return values[kept], kept if ids is None else ids[kept]


def _block_maxima(logits: Tensor) -> Tensor:
    """[R, V] -> [R, ceil(V / _BLOCK)]: the maximum of each block of tokens. NaN makes it NaN."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    maxima = logits[:, :whole].reshape(len(logits), whole // _BLOCK, _BLOCK).amax(dim=-1)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=1)


def _choose_one(raw: Tensor, row: SamplingRow, spec: Sampling) -> int | None:
    """The token of one row ([V] float32, usable), or None where nothing is allowed."""
    adjusted = raw.clone() if row.mask is not None or _changes_logits(spec) else raw
    if row.mask is not None:
        adjusted.masked_fill_(~_allowed(row.mask, raw), _NEG_INF)
    if _changes_logits(spec):
        _adjust(adjusted, row, spec)
    value, token = best_tokens(adjusted.unsqueeze(0))
    best = float(value)
    if not math.isfinite(best):
        return None
    if spec.temperature <= 0:
        return int(token)
    return _draw(adjusted, best, spec, mix_key(spec.seed, row.position))


def _changes_logits(spec: Sampling) -> bool:
    penalties = (spec.repetition_penalty, spec.frequency_penalty, spec.presence_penalty)
    return bool(spec.logit_bias) or penalties != (1.0, 0.0, 0.0)


def _allowed(mask: TokenMask, like: Tensor) -> Tensor:
    """[V] bool. Bits and ids beyond the vocabulary are ignored; bits that are missing forbid."""
    vocab, device = like.shape[0], like.device
    allowed = torch.zeros(vocab, dtype=torch.bool, device=device)
    if mask.packed:
        packed = torch.frombuffer(bytearray(mask.packed), dtype=torch.uint8).to(device)
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1  # [bytes, 8]
        bits = bits.flatten()[:vocab]
        allowed[: bits.shape[0]] = bits.bool()
    elif mask.allowed is not None:
        allowed[_indices(mask.allowed, like)] = True
    return allowed


def _adjust(row: Tensor, settings: SamplingRow, spec: Sampling) -> None:
    """Apply logit_bias and penalties to row ([V] float32) in place. Only the tokens they name are touched."""
    if spec.logit_bias:
        ids = _indices(spec.logit_bias, row)
        bias = _column(spec.logit_bias, ids)
        _store(row, ids, row[ids].double() + bias)
        row[ids[bias == _NEG_INF]] = _NEG_INF
    if spec.repetition_penalty != 1.0:
        ids = _indices(set(settings.history), row)
        values = row[ids].double()
        penalty = spec.repetition_penalty
        _store(row, ids, torch.where(values > 0, values / penalty, values * penalty))
    if spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0:
        counts = Counter(settings.history[settings.prompt_len :])
        ids = _indices(counts, row)
        penalties = _column(counts, ids) * spec.frequency_penalty + spec.presence_penalty
        _store(row, ids, row[ids].double() - penalties)


def _indices(ids: Collection[int], row: Tensor) -> Tensor:
    """[n] int64: those of `ids` that are in the vocabulary of row ([V])."""
    vocab = row.shape[0]
    return torch.tensor([i for i in ids if 0 <= i < vocab], dtype=torch.int64, device=row.device)


def _column(table: Mapping[int, float], ids: Tensor) -> Tensor:
    """[n] float64: the entries of `table` for ids ([n])."""
    return torch.tensor([table[i] for i in ids.tolist()], dtype=torch.float64, device=ids.device)


def _store(row: Tensor, ids: Tensor, values: Tensor) -> None:
    """Set row[ids], rounded to float32. Forbidden tokens stay forbidden, finite values stay finite."""
    values = values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
    row[ids] = torch.where(row[ids] == _NEG_INF, _NEG_INF, values)


class _Candidates(NamedTuple):
    """Tokens still in the race, and their log-weights relative to the best token's."""

    ids: Tensor  # [n] int64, ascending
    log_weights: Tensor  # [n] float64

    def take(self, index: Tensor) -> _Candidates:
        return _Candidates(self.ids[index], self.log_weights[index])


def _draw(row: Tensor, best: float, spec: Sampling, key: int) -> int:
    """Draw from the softmax of row ([V] float32, largest value `best`) cut by top_k, top_p and min_p.

    top_p needs no sorted vocabulary. The race is run over a superset of the top_p set; if its winner is in
    the set (the tokens before it weigh less than p), it is the set's winner too. If not, no token from the
    winner down is in the set, and the race is run again over those above.
    """
    if 0 < spec.top_k < row.shape[0]:
        values, ids = best_k(row, spec.top_k)
        ids, order = ids.sort()
        values = values[order]
    else:
        values, ids = row, torch.arange(row.shape[0], device=row.device)
    runners = _Candidates(ids, values.double().sub_(best).div_(spec.temperature))

    limit = float("inf")
    if spec.top_p < 1.0:
        weights = runners.log_weights.exp()
        limit = spec.top_p * float(weights.sum())
        for cut in _TOP_P_CUTS:
            near = (runners.log_weights >= -cut).nonzero().flatten()
            if float(weights[near].sum()) >= limit:
                runners = runners.take(near)
                break
    if spec.min_p > 0.0:
        runners = runners.take((runners.log_weights.exp() >= spec.min_p).nonzero().flatten())

    while True:
        token, log_weight = _race(runners, key)
        if spec.top_p >= 1.0:
            return token
        before = runners.log_weights > log_weight
        before |= (runners.log_weights == log_weight) & (runners.ids < token)
        above = runners.take(before.nonzero().flatten())
        if above.ids.shape[0] == 0 or float(above.log_weights.exp().sum()) < limit:
            return token
        runners = above


def _race(runners: _Candidates, key: int) -> tuple[int, float]:
    """The id and log-weight of the runner with the largest log-weight + gumbel.

    Noise is bounded, so once the best of the likely tokens is known, most of the others need none drawn.
    """
    if runners.ids.shape[0] > _SMALL_RACE:
        head = runners.take((runners.log_weights >= -_RACE_HEAD).nonzero().flatten())
        if head.ids.shape[0] < runners.ids.shape[0] // 2:
            leader = float((head.log_weights + gumbel(key, head.ids)).max())
            # The rounding of a sum moves a score by far less than the slack.
            reach = leader - GUMBEL_MAX - 1e-6
            runners = runners.take((runners.log_weights >= reach).nonzero().flatten())
    winner = (runners.log_weights + gumbel(key, runners.ids)).argmax()
    return int(runners.ids[winner]), float(runners.log_weights[winner])
