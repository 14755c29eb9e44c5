"""Chooses tokens on a GPU, with the same results as `workers.sampling` on the CPU.

One pass over all rows validates their raw logits, and chooses tokens for greedy rows and plain draws. Rows
with other settings are then copied, since masks, biases and penalties change logits in place. One transfer
sends all settings, and one returns which rows have no valid choice. Tokens stay on the device.

Compared with the CPU, greedy choices are the same with all settings. So are the logits after bias and
penalties, bit by bit. Draws are the same unless float64 rounding decides: two scores within about 1e-14 of
each other, or a token at the very edge of a filter (see `kernels.cuda.sampling_threshold`).

Dimension letters: R rows; V vocabulary; C rows that are copied; M masks; W words of a mask; N biases; P rows
with penalties; H tokens of their histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers import outputs
from workers.counter_rng import mix_key
from workers.logit_settings import Ids, Masks, in_vocabulary
from workers.outputs import Sampling
from workers.sampling import BadLogitsError, NothingAllowedError, SamplingRow

_GREEDY = Sampling()
# For each of `outputs.FILTERS` the value that leaves nothing out, with the type of its column.
NEUTRAL_FILTERS: Mapping[str, np.int32 | np.float64] = {
    name: (np.int32 if isinstance(getattr(_GREEDY, name), int) else np.float64)(getattr(_GREEDY, name))
    for name in outputs.FILTERS
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows copied at once: copy and scratch take 8 bytes for each logit, 160 MB for 128 rows of 152k. A row is one
# program of the kernel, so far fewer rows would leave multiprocessors idle.
ROWS_AT_ONCE = 128

# Rows with drafts at once: the distributions of their drafts take 8 bytes more for each logit.
_DRAFTED_AT_ONCE = 64

# The alignment in bytes of each array in a transfer, for which kernels are specialised.
_ALIGNMENT = 16

_INT32_MAX = 2**31 - 1
HISTORY_COLUMNS = ("history", "begins", "prompt_ends", "ends")
_PENALTY_COLUMNS = ("penalty_rows", "counts", "repetitions", "frequencies", "presences")

Columns = dict[str, NDArray[Any]]  # settings of some rows, by the name of a kernel's argument


def is_simple(row: SamplingRow) -> bool:
    """Whether a row's choice only needs a temperature and a key, and so no copy."""
    spec = row.spec
    return row.mask is None and (spec is None or not (spec.changes_logits or spec.is_filtered))


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """As `workers.sampling.choose_tokens`, on a CUDA device.

    `logits`: [R, V], also bfloat16 or float16; the tokens of a row are contiguous.
    """
    if logits.ndim != 2 or len(logits) != len(rows) or not logits.shape[1] or logits.dtype not in _DTYPES:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} for {len(rows)} rows")
    if logits.stride(1) != 1:
        raise ValueError(f"logits with a stride of {logits.stride(1)} between tokens")
    from kernels.cuda import sampling  # noqa: PLC0415 - a worker without a GPU never loads triton

    others = [index for index, row in enumerate(rows) if not is_simple(row)]
    chunks = [others[first : first + ROWS_AT_ONCE] for first in range(0, len(others), ROWS_AT_ONCE)]
    # The others are validated in the same pass, as greedy rows, which need no noise.
    plain = [row if is_simple(row) else SamplingRow() for row in rows]
    settings = [_draws(plain), *(_settings(rows, chunk, logits.shape[1]) for chunk in chunks)]
    draws, *adjusted = _send(settings, logits.device)

    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    best = torch.empty(len(rows) + len(others), dtype=torch.float32, device=logits.device)
    sampling.choose(logits, draws["temperatures"], draws["keys"], chosen, best[: len(rows)])
    validated = len(rows)
    for columns in adjusted:
        where = columns["where"]  # [C]
        ids = torch.empty_like(where)
        copy = logits.index_select(0, where).float()  # [C, V]
        choose_adjusted(copy, columns, ids, best[validated : validated + len(ids)])
        chosen.index_copy_(0, where, ids)
        validated += len(ids)

    usable = best.isfinite().tolist()  # the only wait for the device
    if not all(usable[: len(rows)]):
        raise BadLogitsError([index for index in range(len(rows)) if not usable[index]])
    if not all(usable):
        raise NothingAllowedError(
            [row for row, ok in zip(others, usable[len(rows) :], strict=True) if not ok]
        )
    return chosen


def sampled_logprobs(logits: Tensor, tokens: Sequence[int], rows: Sequence[SamplingRow]) -> list[float]:
    """The log-probability of one token of each row, in the distribution that it was drawn from.

    One transfer for all rows there, and one back. -infinity for a token that is not among those kept.

    Args:
        logits: As for `choose_tokens`, which has accepted them with these rows. Not modified.
        tokens: R of them, in the vocabulary.
        rows: R of them.
    """
    from kernels.cuda import sampling_weight  # noqa: PLC0415 - as in choose_tokens

    everyone = range(len(rows))
    chunks = [everyone[first : first + ROWS_AT_ONCE] for first in everyone[::ROWS_AT_ONCE]]
    settings = [
        {**_settings(rows, chunk, logits.shape[1]), "tokens": np.array(tokens, dtype=np.int64)[chunk]}
        for chunk in chunks
    ]
    found = torch.empty(len(rows), dtype=torch.float64, device=logits.device)
    for chunk, columns in zip(chunks, _send(settings, logits.device), strict=True):
        copy = logits.index_select(0, columns["where"]).float()  # [C, V]
        thresholds = _adjust_and_filter(copy, columns)
        out = found[chunk.start : chunk.stop]
        sampling_weight.log_probabilities(copy, columns["temperatures"], columns["tokens"], out, *thresholds)
    listed: list[float] = found.tolist()
    return listed


def choose_with_drafts(
    logits: Tensor, rows: Sequence[SamplingRow], keys: Sequence[tuple[int, int]]
) -> Tensor:
    """As `workers.numpy_choice.choose_with_draft`, for rows that all have drafts.

    Args:
        logits: As for `choose_tokens`, which has accepted them with these rows. Not modified.
        rows: R of them.
        keys: R pairs: those by which drafts are kept, and by which other tokens are drawn.

    Returns:
        [R] int64 on the device of `logits`.
    """
    from kernels.cuda import sampling_drafts  # noqa: PLC0415 - as in choose_tokens

    vocab, everyone = logits.shape[1], range(len(rows))
    chunks = [everyone[first : first + _DRAFTED_AT_ONCE] for first in everyone[::_DRAFTED_AT_ONCE]]
    settings = [
        _settings(rows, chunk, vocab) | _drafts([rows[index] for index in chunk], vocab) | _pairs(keys, chunk)
        for chunk in chunks
    ]
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    most = [int(np.diff(columns["begins"]).max()) for columns in settings]
    for chunk, columns, most_drafts in zip(chunks, _send(settings, logits.device), most, strict=True):
        copy = logits.index_select(0, columns["where"]).float()  # [C, V]
        thresholds = _adjust_and_filter(copy, columns)
        drawn_from = torch.zeros(copy.shape, dtype=torch.float64, device=copy.device)  # [C, V]
        drawn_from[columns["listed_rows"], columns["listed_ids"]] = columns["listed_probabilities"]
        if "dense" in columns:
            drawn_from[columns["dense_rows"]] = columns["dense"]
        sampling_drafts.keep_or_draw(
            copy,
            columns["temperatures"],
            *thresholds,
            drawn_from,
            columns["drafts"],
            columns["begins"],
            most_drafts,
            columns["keep_keys"],
            columns["draw_keys"],
            out=chosen[chunk.start : chunk.stop],
        )
    return chosen


def choose_adjusted(copy: Tensor, columns: dict[str, Tensor], ids: Tensor, best: Tensor) -> None:
    """Choose with all settings, in columns [C] on the device.

    Mutates copy [C, V] float32, and ids [C] and best [C] as `kernels.cuda.sampling.choose` does. The copy may
    have a row more, for biases and masks that are no row's. Launches what follows from the shapes, and from
    which columns there are: it can be captured in a CUDA graph. Tokens of histories may be counted already,
    in the column "counts" [C, V].
    """
    from kernels.cuda import sampling  # noqa: PLC0415 - as in choose_tokens

    thresholds = _adjust_and_filter(copy, columns)
    sampling.choose(copy[: len(ids)], columns["temperatures"], columns["keys"], ids, best, *thresholds)


def _adjust_and_filter(copy: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Apply masks, biases, penalties and filters to copy [C, V]. Returns what `apply_filters` does.

    What is kept is [C] the last logit and the last id of it; None: everything.
    """
    from kernels.cuda import sampling_adjust, sampling_filters  # noqa: PLC0415 - as in choose_tokens

    if "words" in columns:
        sampling_adjust.apply_masks(copy, columns["mask_rows"], columns["words"])
    if "biases" in columns:
        sampling_adjust.apply_biases(copy, columns["bias_rows"], columns["bias_ids"], columns["biases"])
    if "history" in columns:
        counts = copy.new_zeros((len(columns["penalty_rows"]), copy.shape[1]), dtype=torch.int32)
        sampling_adjust.count_histories(counts, *(columns[name] for name in HISTORY_COLUMNS))
        columns = {**columns, "counts": counts}
    if "counts" in columns:
        sampling_adjust.apply_penalties(copy, *(columns[name] for name in _PENALTY_COLUMNS))
    filters = {name: columns[name] for name in outputs.FILTERS if name in columns}
    if not filters:
        return None, None
    return sampling_filters.apply_filters(copy, columns["temperatures"], **filters)


def _settings(rows: Sequence[SamplingRow], where: Sequence[int], vocab: int) -> Columns:
    """The columns for the rows with these indexes, without those of settings that no row has."""
    some = [rows[index] for index in where]
    columns = {"where": np.array(where, dtype=np.int64), **_draws(some)}
    specs = [row.spec or _GREEDY for row in some]
    return columns | adjustments(some, vocab) | filters(specs)


def adjustments(rows: Sequence[SamplingRow], vocab: int) -> Columns:
    """The columns of masks, biases and penalties, without those that no row has."""
    return _masks(rows, vocab) | _biases(rows, vocab) | _penalties(rows, vocab)


def _draws(rows: Sequence[SamplingRow]) -> Columns:
    """[C] temperatures and keys."""
    specs = [row.spec or _GREEDY for row in rows]
    keys = [mix_key(spec.seed, row.position) for spec, row in zip(specs, rows, strict=True)]
    return {
        "temperatures": np.array([spec.temperature for spec in specs], dtype=np.float64),
        "keys": np.array(keys, dtype=np.uint64).view(
            np.int64
        ),  # torch computes with none but signed integers
    }


def filters(specs: Sequence[Sampling]) -> Columns:
    """[C] for each of `outputs.FILTERS`. None of them if they matter to no row."""
    if not any(spec.is_filtered for spec in specs):
        return {}
    filtered = [spec if spec.is_filtered else _GREEDY for spec in specs]
    return {
        name: np.array([min(getattr(spec, name), _INT32_MAX) for spec in filtered], dtype=neutral.dtype)
        for name, neutral in NEUTRAL_FILTERS.items()
    }


def _masks(rows: Sequence[SamplingRow], vocab: int) -> Columns:
    """[M] mask_rows and [M, W] words."""
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return {}
    decoded = Masks(vocab)
    words = np.stack([decoded.packed(mask).view("<i4") for mask in masks.values()])
    return {"mask_rows": np.array(list(masks), dtype=np.int32), "words": words}


def _biases(rows: Sequence[SamplingRow], vocab: int) -> Columns:
    """[N] bias_rows, bias_ids and biases."""
    listed = [
        (index, token, row.spec.logit_bias[token])
        for index, row in enumerate(rows)
        if row.spec is not None and row.spec.logit_bias
        for token in in_vocabulary(row.spec.logit_bias, vocab).tolist()
    ]
    if not listed:
        return {}
    owners, ids, biases = zip(*listed, strict=True)
    return {
        "bias_rows": np.array(owners, dtype=np.int32),
        "bias_ids": np.array(ids, dtype=np.int32),
        "biases": np.array(biases, dtype=np.float64),
    }


def _penalties(rows: Sequence[SamplingRow], vocab: int) -> Columns:
    """[P] penalty_rows, begins, prompt_ends, ends, repetitions, frequencies and presences; [H] history."""
    having = [(index, row.spec, row) for index, row in enumerate(rows) if row.spec and row.spec.has_penalty]
    if not having:
        return {}
    histories, places, where = list[Ids](), dict[object, int](), list[tuple[int, int, int, int]]()
    size = 0
    for index, _, row in having:
        tokens, key = row.history, id(row.history)
        end = len(tokens) if row.history_len is None else row.history_len
        if row.path:
            tokens, key = [*tokens[:end], *row.path], id(row)
            end = len(tokens)
        # Rows of one forward share a history, of which they have more or less.
        begin = places.get(key)
        if begin is None:
            begin = places[key] = size
            histories.append(np.asarray(tokens, dtype=np.int64))
            size += len(tokens)
        where.append((index, begin, begin + row.prompt_len, begin + end))
    owners, begins, prompt_ends, ends = np.array(where, dtype=np.int64).T
    specs = [spec for _, spec, _ in having]
    return {
        "penalty_rows": owners,
        "begins": begins,
        "prompt_ends": prompt_ends,
        "ends": ends,
        # Ids outside of the vocabulary stay outside.
        "history": np.concatenate(histories).clip(-1, vocab).astype(np.int32),
        "repetitions": np.array([spec.repetition_penalty for spec in specs], dtype=np.float64),
        "frequencies": np.array([spec.frequency_penalty for spec in specs], dtype=np.float64),
        "presences": np.array([spec.presence_penalty for spec in specs], dtype=np.float64),
    }


def _drafts(rows: Sequence[SamplingRow], vocab: int) -> Columns:
    """[D] drafts and [C + 1] begins; of their distributions [n] listed ids, or [n, V] dense ones."""
    drafts = [row.draft for row in rows if row.draft is not None]
    tokens = [np.asarray(draft.token_ids, dtype=np.int64) for draft in drafts]
    owners, ids, probabilities, dense = (
        list[Ids](),
        list[Ids](),
        list[NDArray[np.float64]](),
        dict[int, Any](),
    )
    for index, draft in enumerate(drafts):
        own = draft.drawn_from
        if own.ids is None:
            dense[index] = own.probabilities
            continue
        known = own.ids < vocab
        ids.append(own.ids[known])
        probabilities.append(own.probabilities[known])
        owners.append(np.full(len(ids[-1]), index))
    none = np.zeros(0, dtype=np.int64)
    columns: Columns = {
        "drafts": np.concatenate(tokens),
        "begins": np.cumsum([0, *map(len, tokens)]),
        "listed_rows": np.concatenate([none, *owners]),
        "listed_ids": np.concatenate([none, *ids]),
        "listed_probabilities": np.concatenate([none.astype(np.float64), *probabilities]),
    }
    if dense:
        columns |= {"dense_rows": np.array(list(dense)), "dense": np.stack(list(dense.values()))}
    return columns


def _pairs(keys: Sequence[tuple[int, int]], where: Sequence[int]) -> Columns:
    """[C] keep_keys and draw_keys."""
    words = np.array([keys[index] for index in where], dtype=np.uint64).view(np.int64).T
    return {"keep_keys": words[0], "draw_keys": words[1]}


def _send(tables: Sequence[Columns], device: torch.device) -> list[dict[str, Tensor]]:
    """Send all arrays to the device in one transfer. The tensors are views of one buffer."""
    starts, size = [], 0
    arrays = [array for table in tables for array in table.values()]
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = device.type == "cuda"  # so that the host does not wait for the transfer
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    bytes_of = buffer.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_of[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = buffer.to(device, non_blocking=pinned)

    offsets = iter(starts)
    return [{name: _view(sent, next(offsets), array) for name, array in table.items()} for table in tables]


def _view(buffer: Tensor, start: int, array: NDArray[Any]) -> Tensor:
    """The bytes from `start` on, as a tensor with the array's shape and type."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
