"""The outputs of rows as plain data: log-probabilities, likely tokens, logits, hidden states and experts.

Log-probabilities are those of the model's own distribution: the log-softmax, in float32, of the logits
before any sampling setting. Each row's numbers are bitwise independent of the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.given_experts import ONE_BYTE_EXPERTS
from workers.operations import LogitsFormat, OutputSpec, RowOutput
from workers.sampling import BadLogitsError, best_k

# Rows whose log-softmax is in memory at once: 10 MB for a vocabulary of 152k.
_ROWS_AT_A_TIME = 16

# For each format: the number type, an integer type of its size (numpy has no bfloat16), its name in numpy.
_ENCODINGS = {
    LogitsFormat.F32: (torch.float32, torch.int32, "<i4"),
    LogitsFormat.BF16: (torch.bfloat16, torch.int16, "<i2"),
    LogitsFormat.F16: (torch.float16, torch.int16, "<i2"),
}


def build_outputs(logits: Tensor, chosen: Tensor, specs: Sequence[OutputSpec]) -> list[RowOutput]:
    """One RowOutput for each row, with what its spec requests.

    `top_ids` are ordered by logit, the lower id first among equals, so the greedy token is always the first
    (two logits may differ by less than their log-probabilities resolve). There are V of them at most.

    Args:
        logits: [R, V] floating point, the model's own, rows accepted by `choose_tokens`. Not modified.
        chosen: [R] int64 in [0, V), any device.
        specs: R of them.

    Returns:
        R outputs that own their data.

    Raises:
        ValueError: shapes do not fit, or an id of logprob_token_ids is not in the vocabulary.
    """
    count = len(specs)
    if logits.ndim != 2 or logits.shape[0] != count or tuple(chosen.shape) != (count,):
        raise ValueError(f"logits {tuple(logits.shape)}, chosen {tuple(chosen.shape)}, {count} specs")
    listed = _listed_ids(specs, logits)
    outputs = [RowOutput(token_id=token) for token in chosen.tolist()]
    wanted = [
        i for i, spec in enumerate(specs) if spec.logprob or spec.top_logprobs or spec.logprob_token_ids
    ]
    for row, logprobs in _log_softmax_rows(logits, wanted):
        _add_logprobs(outputs[row], specs[row], logits[row], logprobs, listed.get(id(specs[row])))
    for row, spec in enumerate(specs):
        if spec.logits is not None:
            outputs[row].logits = encode_row(logits[row], spec.logits)
            outputs[row].logits_format = spec.logits
    return outputs


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For given tokens: the log-probability (-inf: impossible), and whether no other was more likely."""

    logprobs: list[float]
    is_argmax: list[bool]


def score_tokens(logits: Tensor, targets: Tensor) -> TokenScores:
    """Score one given token for each row.

    Args:
        logits: [R, V] floating point. Not modified.
        targets: [R] int64 in [0, V), any device.

    Returns:
        R log-probabilities, and R flags.

    Raises:
        ValueError: shapes do not fit.
        BadLogitsError: rows with NaN or +infinity, or only -infinity.
    """
    if logits.ndim != 2 or tuple(targets.shape) != (logits.shape[0],):
        raise ValueError(f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}")
    targets = targets.to(logits.device)
    scores: list[float] = []
    is_argmax: list[bool] = []
    for start in range(0, logits.shape[0], _ROWS_AT_A_TIME):
        end = start + _ROWS_AT_A_TIME
        group, wanted = logits[start:end].float(), targets[start:end].unsqueeze(1)
        scores += _log_softmax(group).gather(1, wanted).flatten().tolist()
        is_argmax += (group.gather(1, wanted).flatten() >= group.amax(dim=-1)).tolist()
    bad = [row for row, score in enumerate(scores) if math.isnan(score)]
    if bad:
        raise BadLogitsError(bad)
    return TokenScores(scores, is_argmax)


def add_hidden(
    outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], found: Mapping[int, Tensor]
) -> None:
    """Set the hidden states that specs request.

    Args:
        outputs: R of them. Mutated.
        specs: R of them.
        found: By layer, [K, C] for the rows whose specs name the layer, in the order of the rows.
    """
    # One transfer for each layer.
    remaining = {layer: iter(states.cpu()) for layer, states in found.items()}
    for output, spec in zip(outputs, specs, strict=True):
        if spec.hidden is not None:
            # A layer may be named twice.
            encoded = {
                layer: encode_row(next(remaining[layer]), spec.hidden.number_format)
                for layer in dict.fromkeys(spec.hidden.layers)
            }
            output.hidden = [encoded[layer] for layer in spec.hidden.layers]
            output.hidden_format = spec.hidden.number_format


def add_experts(
    outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], found: Sequence[Tensor], num_experts: int
) -> None:
    """Set the experts that specs request.

    Args:
        outputs: R of them. Mutated.
        specs: R of them.
        found: For each layer with experts [K, E] int64, the rows whose specs request them, in their order.
        num_experts: Of each layer.
    """
    is_narrow = num_experts <= ONE_BYTE_EXPERTS
    ids = torch.stack(list(found), dim=1).to(torch.uint8 if is_narrow else torch.int16)  # [K, L, E]
    remaining = iter(ids.cpu().numpy().astype("u1" if is_narrow else "<i2", copy=False))
    for output, spec in zip(outputs, specs, strict=True):
        if spec.experts:
            output.experts = next(remaining).tobytes()


def encode_row(row: Tensor, number_format: LogitsFormat) -> bytes:
    """One row ([N]) as little-endian numbers, rounded to nearest. F16 makes inf of 65520 and more."""
    dtype, same_size, little_endian = _ENCODINGS[number_format]
    bits = row.to(dtype).contiguous().view(same_size).cpu().numpy()
    return bits.astype(little_endian, copy=False).tobytes()


def _log_softmax_rows(logits: Tensor, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields (row, its [V] log-softmax), computed for a few rows at a time. The tensors are views."""
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        group = rows[start : start + _ROWS_AT_A_TIME]
        first, end = group[0], group[-1] + 1
        # Usually the rows are contiguous: slicing does not copy them.
        some = logits[first:end] if end - first == len(group) else logits[group]
        yield from zip(group, _log_softmax(some.float()), strict=True)


def _log_softmax(logits: Tensor) -> Tensor:
    """[n, V] float32 -> [n, V], each row independent of the others."""
    vocab = logits.shape[1]
    if logits.is_cuda and vocab % 4:
        # torch divides the sum of a row among threads by the row's alignment to 16 bytes. Make all the same.
        logits = functional.pad(logits, (0, -vocab % 4), value=-math.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab]


def _listed_ids(specs: Sequence[OutputSpec], logits: Tensor) -> dict[int, Tensor]:
    """By id of a spec, which rows of a request share: its [n] `logprob_token_ids`, on the device of `logits`.

    Raises ValueError for an id that is not in the vocabulary.
    """
    listed: dict[int, Tensor] = {}
    for spec in specs:
        if spec.logprob_token_ids and id(spec) not in listed:
            ids = torch.tensor(spec.logprob_token_ids, dtype=torch.int64)
            if ((ids < 0) | (ids >= logits.shape[1])).any():
                raise ValueError(f"logprob_token_ids beyond a vocabulary of {logits.shape[1]}")
            listed[id(spec)] = ids.to(logits.device)
    return listed


def _add_logprobs(
    output: RowOutput, spec: OutputSpec, logits: Tensor, logprobs: Tensor, listed: Tensor | None
) -> None:
    """Set the log-probabilities that `spec` requests. logits, logprobs: [V]; listed: [n]."""
    if spec.logprob or spec.top_logprobs:
        if spec.top_logprobs:
            output.top_ids = best_k(logits.float().cpu().numpy(), spec.top_logprobs).tolist()
        ids = torch.tensor([output.token_id, *output.top_ids], device=logprobs.device)
        output.logprob, *output.top_logprobs = logprobs[ids].tolist()
    if listed is not None:
        output.chosen_logprobs = logprobs[listed].tolist()
