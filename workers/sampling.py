"""Chooses tokens from logits: applies `Sampling` and `TokenMask`, then makes a greedy or random choice.

Each row is chosen independently. Its token is a pure function of its logits, settings, seed and position. It
does not depend on the rest of the batch or on earlier draws. `Sampling` says in which order settings apply.
Among equal logits the lowest id counts as the most likely.

On the CPU one compiled call chooses for all rows. If no kernels are compiled, `numpy_choice` does it row by
row.

The gateway checks the ranges of settings. Token ids beyond the vocabulary are ignored here, so that one row
cannot make the batch fail with an index error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu import sampling as compiled
from kernels.cpu.sampling import RowChoice
from workers import numpy_choice
from workers.counter_rng import mix_key
from workers.logit_settings import Ids, Masks, in_vocabulary
from workers.outputs import FILTERS, DraftProbabilities, Sampling, TokenMask, filters_of

_NEG_INF = float("-inf")
_GREEDY = Sampling()

Row = NDArray[np.float32]  # [V] logits
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draft:
    """Independent draft tokens for one position, and their distribution. The first acceptable is kept."""

    token_ids: Sequence[int]
    drawn_from: DraftProbabilities


class SamplingError(Exception):
    """No token can be chosen for the rows in `rows`. To choose for the others, call again without these.

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
    """How the token of one row is chosen. Not modified, but not frozen: that would take five times as long.

    Attributes:
        spec: None: greedy.
        mask: None: every token is allowed.
        position: Of the chosen token in its sequence. It determines the draw.
        history: The tokens of the sequence before it, for penalties. Rows of one forward share it, so it may
            contain later tokens, too.
        history_len: How many tokens of `history` are before it. None: all.
        draft: The drafts for this position. Then `distribution` chooses.
        path: In a token tree, the tokens between `history` and this one.
        prompt_len: How many first tokens of `history` frequency and presence penalties do not count.
    """

    spec: Sampling | None = None
    mask: TokenMask | None = None
    position: int = 0
    history: Sequence[int] | Ids = ()
    prompt_len: int = 0
    history_len: int | None = None
    draft: Draft | None = None
    path: Sequence[int] = ()


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

    # Most rows have no settings: checking that first saves a call for each.
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
    known, choices = RowChoices(logits.shape[1]), dict[int, RowChoice]()
    for index in indexes:
        row, choice = rows[index], known.choice(rows[index])
        choice.keys = keys_of([0 if row.spec is None else row.spec.seed], row.position)
        if row.draft is not None:
            choice.temperature = 0.0  # `distribution` chooses; here any allowed token will do
        choices[index] = choice
    choose_rows(logits, choices)
    return [int(choice.tokens[0]) if choice.candidates else None for choice in choices.values()]


def best_k(row: Row, k: int) -> Ids:
    """The k tokens with the largest logits, largest first, the lower id first among equals.

    Args:
        row: [V] without NaN. Not modified.
        k: at least 1.

    Returns:
        At most k ids: tokens with a logit of -infinity are left out.
    """
    # The row is divided into groups. At least k tokens, and few more, reach the k-th largest of the groups'
    # maxima. So there is little to sort, and the row is read once or twice.
    bound = np.float32(_NEG_INF)
    group = min(256, len(row) // (2 * k))
    if group >= 8:
        maxima = row[: len(row) // group * group].reshape(-1, group).max(axis=1)
        bound = np.partition(maxima, -k)[-k]
    ids = np.flatnonzero(row >= bound if bound > _NEG_INF else row > _NEG_INF)
    order = np.argsort(-row[ids], kind="stable")  # stable: ids stay ascending among equal logits
    return ids[order[:k]]


def _argmax_rows(logits: Tensor) -> tuple[Tensor, list[int]]:
    """[R] int64, the lowest id of each row's largest logit; and the rows where that logit is not finite.

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


def _column(table: Mapping[int, float], ids: Ids) -> Reals:
    return np.array([table[i] for i in ids.tolist()], dtype=np.float64)


def choose_rows(logits: Tensor, choices: Mapping[int, RowChoice]) -> None:
    """Choose tokens for some rows on the host. Writes the results into `choices`.

    Args:
        logits: [R, V], any floating dtype and device. Not modified.
        choices: By the index of the row.
    """
    choose = compiled.choose if compiled.available() else numpy_choice.choose
    choose(logits.float().cpu().contiguous(), choices)


class RowChoices:
    """Makes the arguments of `choose_rows`. Decodes masks and histories that rows share only once."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._masks = Masks(vocab)
        # By id, valid as long as the history is kept here.
        self._histories: dict[int, tuple[object, Ids]] = {}

    def choice(self, row: SamplingRow) -> RowChoice:
        """The row's settings. The caller adds `keys` or `tokens`, drafts, and which results it wants."""
        spec = row.spec or _GREEDY
        choice = RowChoice(
            temperature=spec.temperature,
            filters=dict(zip(FILTERS, filters_of(spec), strict=True)),
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


def keys_of(seeds: Iterable[int], position: int) -> NDArray[np.uint64]:
    """The keys of draws with these seeds."""
    return np.array([mix_key(seed, position) for seed in seeds], dtype=np.uint64)
