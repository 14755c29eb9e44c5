"""Calls the compiled choice of tokens in sampling.cpp. One call for all rows.

Dimension letters: R rows; V vocabulary; N draws of a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.library import doubles, integers, pointers

Ids = NDArray[np.int64]
Reals = NDArray[np.float64]

_NO_IDS: Ids = np.zeros(0, dtype=np.int64)
_NO_REALS: Reals = np.zeros(0)


class _Filters(ctypes.Structure):
    """Filters of token_filters.h: the fields must agree. They are named as in `workers.outputs.FILTERS`."""

    _fields_ = (*integers("top_k"), *doubles("top_p min_p typical_p"))


class _Row(ctypes.Structure):
    """RowArguments of sampling.cpp: the fields must agree."""

    _fields_ = (
        *pointers("logits mask history path biased bias draft_ids draft drafted keys tokens logprobs"),
        *integers("history_len path_len prompt_len biases draft_len drafts draws"),
        ("keep_key", ctypes.c_uint64),
        ("residual_key", ctypes.c_uint64),
        *doubles("temperature repetition frequency presence"),
        ("filters", _Filters),
        *integers("candidates"),
    )


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of another model, and their distribution.

    Attributes:
        token_ids: They are in the vocabulary.
        ids: Ascending; None: the vocabulary.
        probabilities: One for each of `ids`.
        keep_key, residual_key: For the draws that keep drafts, and for the one that replaces them.
    """

    token_ids: Ids
    ids: Ids | None
    probabilities: Reals
    keep_key: int
    residual_key: int


@dataclass(slots=True)
class RowChoice:
    """How the tokens of one row are chosen, as in `workers.outputs.Sampling`, and the results.

    Attributes:
        filters: By name, all of them.
        mask: [V / 8 rounded up to words of 4] uint8; None allows every token.
        history: The tokens before the row, of which `history_len` count, and then those of `path`.
        biased, bias: Token ids, in the vocabulary, and what is added to their logits.
        keys: [N] uint64, one for each draw. None: `tokens` are given, for their log-probabilities.
        drafts: The only token is chosen by rejection sampling.
        wants_logprobs: Of the tokens in the distribution that they are drawn from.
        tokens: [N] int64, set by the call unless they are given.
        logprobs: [N] float64, set by the call.
        candidates: How many tokens can be drawn, set by the call. 0: none, and `tokens` are meaningless.
    """

    temperature: float
    filters: Mapping[str, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    mask: NDArray[np.uint8] | None = None
    history: Ids = field(default_factory=lambda: _NO_IDS)
    history_len: int = 0
    path: Ids = field(default_factory=lambda: _NO_IDS)
    prompt_len: int = 0
    biased: Ids = field(default_factory=lambda: _NO_IDS)
    bias: Reals = field(default_factory=lambda: _NO_REALS)
    keys: NDArray[np.uint64] | None = None
    drafts: Drafts | None = None
    wants_logprobs: bool = False
    tokens: Ids = field(default_factory=lambda: _NO_IDS)
    logprobs: Reals = field(default_factory=lambda: _NO_REALS)
    candidates: int = 0


def available() -> bool:
    """Whether the kernels are available."""
    return library.available()


def choose(logits: torch.Tensor, rows: Mapping[int, RowChoice]) -> None:
    """Choose tokens for some rows. Mutates the results in `rows`. Requires `available`. Releases the GIL.

    Args:
        logits: [R, V] float32 on the CPU, tokens contiguous, neither NaN nor +infinity. Not modified.
        rows: By the index of the row.

    Raises:
        ValueError: Something does not fit the vocabulary.
    """
    _check(logits)
    vocab, table = logits.shape[1], (_Row * len(rows))()
    for filled, (index, row) in zip(table, rows.items(), strict=True):
        _fill(filled, row, logits[index].data_ptr(), vocab)
    run = library.function(
        "quire_choose_tokens", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    )
    run(ctypes.addressof(table), len(rows), vocab, torch.get_num_threads())
    for row, filled in zip(rows.values(), table, strict=True):
        row.candidates = filled.candidates


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of some tokens, added up in float64 in one order. Requires `available`.

    Args:
        logits: [R, V] float32 on the CPU, contiguous. Not modified.
        ids: [R, k] int64, from 0 to V - 1.

    Returns:
        [R, k] float32; NaN for rows with NaN or +infinity, or only -infinity.

    Raises:
        ValueError: Something does not fit.
    """
    _check(logits)
    (count, vocab), ids = logits.shape, ids.contiguous()
    if not logits.is_contiguous() or ids.dtype != torch.int64 or ids.ndim != 2 or len(ids) != count:
        raise ValueError(f"logits {logits.stride()}, ids {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"token ids beyond a vocabulary of {vocab}")
    out = torch.empty(ids.shape)
    run = library.function("quire_log_probabilities", (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4))
    addresses = out.data_ptr(), logits.data_ptr(), ids.data_ptr()
    run(*addresses, count, vocab, ids.shape[1], torch.get_num_threads())
    return out


def _check(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.ndim != 2:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} on {logits.device}")
    if logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} with strides {logits.stride()}")


def _fill(out: _Row, row: RowChoice, logits: int, vocab: int) -> None:
    """Describe a row to the kernel. Allocates its results. Arrays are used where they are."""
    if row.keys is not None:
        row.tokens = np.empty(len(row.keys), dtype=np.int64)
        out.keys = row.keys.ctypes.data
    out.logits, out.tokens, out.draws = logits, row.tokens.ctypes.data, len(row.tokens)
    if row.wants_logprobs:
        row.logprobs = np.empty(len(row.tokens))
        out.logprobs = row.logprobs.ctypes.data
    out.temperature, out.filters = row.temperature, _Filters(**row.filters)
    out.repetition, out.frequency, out.presence = (
        row.repetition_penalty, row.frequency_penalty, row.presence_penalty
    )  # fmt: skip
    if row.mask is not None:
        if len(row.mask) * 8 < vocab or len(row.mask) % 4:
            raise ValueError(f"a mask of {len(row.mask)} bytes for a vocabulary of {vocab}")
        out.mask = row.mask.ctypes.data
    out.history, out.history_len = row.history.ctypes.data, min(row.history_len, len(row.history))
    out.path, out.path_len, out.prompt_len = row.path.ctypes.data, len(row.path), row.prompt_len
    out.biased, out.bias, out.biases = row.biased.ctypes.data, row.bias.ctypes.data, len(row.biased)
    ids = [row.biased] if row.keys is not None else [row.biased, row.tokens]
    if row.drafts is not None:
        drafts = row.drafts
        expected = vocab if drafts.ids is None else len(drafts.ids)
        if len(drafts.probabilities) != expected or len(row.tokens) != 1:
            raise ValueError(f"{len(drafts.probabilities)} probabilities of drafts, not {expected}")
        ids.append(drafts.token_ids)
        out.draft_ids = None if drafts.ids is None else drafts.ids.ctypes.data
        out.draft, out.draft_len = drafts.probabilities.ctypes.data, expected
        out.drafted, out.drafts = drafts.token_ids.ctypes.data, len(drafts.token_ids)
        out.keep_key, out.residual_key = drafts.keep_key, drafts.residual_key
    for some in ids:
        if len(some) and not 0 <= int(some.min()) <= int(some.max()) < vocab:
            raise ValueError(f"token ids beyond a vocabulary of {vocab}")
