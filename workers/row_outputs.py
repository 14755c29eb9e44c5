"""The outputs of rows: logprobs, entropy, most likely tokens, logits, hidden states and experts.

Logprobs are of the model's own distribution: the log-softmax of the logits before any sampling setting. They
are computed in float32, or with compiled kernels in float64 and then rounded. The bits of each row do not
depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import sampling as compiled
from workers.given_experts import ONE_BYTE_EXPERTS
from workers.models.capture import RowCapture
from workers.operations import Forward
from workers.outputs import DataType, OutputSpec, RowOutput
from workers.sampling import BadLogitsError, best_k

# Rows whose log-softmax is in memory at once: 10 MB for a vocabulary of 152k.
_ROWS_AT_A_TIME = 16

# So many more tokens are taken than requested, since equal logits at the end have to be ordered by id.
_SPARE_TOP = 8

# For each format: the number type, an integer type of its size (numpy has no bfloat16), its name in numpy.
_ENCODINGS = {
    DataType.F32: (torch.float32, torch.int32, "<i4"),
    DataType.BF16: (torch.bfloat16, torch.int16, "<i2"),
    DataType.F16: (torch.float16, torch.int16, "<i2"),
}


def build_outputs(logits: Tensor, chosen: Tensor, specs: Sequence[OutputSpec]) -> list[RowOutput]:
    """One RowOutput for each row, with what its spec requests.

    `top_ids` are ordered by logit, the lower id first among equals. So the greedy token is always the first,
    even if the logprobs of two different logits are equal. There are at most V of them.

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
    listed = _listed_ids(specs, logits.shape[1])
    outputs = [RowOutput(token_id=token) for token in chosen.tolist()]
    wanted = [
        i for i, spec in enumerate(specs) if spec.logprob or spec.top_logprobs or spec.logprob_token_ids
    ]
    if wanted:
        _add_top_ids(outputs, specs, logits, [row for row in wanted if specs[row].top_logprobs])
    for start in range(0, len(wanted), _ROWS_AT_A_TIME):
        _add_logprobs(outputs, specs, logits, wanted[start : start + _ROWS_AT_A_TIME], listed)
    for row, spec in enumerate(specs):
        if spec.entropy:
            outputs[row].entropy = entropy(logits[row])
        if spec.logits is not None:
            outputs[row].logits = encode_row(logits[row], spec.logits)
            outputs[row].logits_format = spec.logits
    return outputs


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For given tokens: the logprob (-inf: impossible), and whether no other token was more likely."""

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
        scores += log_probabilities(group, wanted).flatten().tolist()
        is_argmax += (group.gather(1, wanted).flatten() >= group.amax(dim=-1)).tolist()
    bad = [row for row, score in enumerate(scores) if math.isnan(score)]
    if bad:
        raise BadLogitsError(bad)
    return TokenScores(scores, is_argmax)


def add_captured(
    outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], capture: RowCapture, num_experts: int
) -> None:
    """Add captured hidden states and experts to the outputs. `num_experts`: in each layer."""
    _add_hidden(outputs, specs, capture.found)
    if capture.expert_rows:
        _add_experts(outputs, specs, capture.experts, num_experts)


def _add_hidden(
    outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], found: Mapping[int, Tensor]
) -> None:
    """Set the hidden states that specs request. For means they are left in `states`: see `add_means`.

    Args:
        outputs: R of them. Mutated.
        specs: R of them.
        found: By layer, [K, C] for the rows whose specs name the layer, in the order of the rows.
    """
    # One copy to the host for each layer.
    remaining = {layer: iter(states.cpu()) for layer, states in found.items()}
    for output, spec in zip(outputs, specs, strict=True):
        if spec.hidden is not None:
            # A layer may be named twice.
            states = {layer: next(remaining[layer]) for layer in dict.fromkeys(spec.hidden.layers)}
            if spec.hidden.mean:
                output.states = [states[layer].float().numpy() for layer in spec.hidden.layers]
                continue
            encoded = {layer: encode_row(row, spec.hidden.number_format) for layer, row in states.items()}
            output.hidden = [encoded[layer] for layer in spec.hidden.layers]
            output.hidden_format = spec.hidden.number_format


def add_means(forward: Forward, outputs: Sequence[RowOutput], count: int) -> None:
    """Set the hidden states of a chunk's last rows to the means over the forward's tokens up to each row.

    States are added one after the other, so that the bits do not depend on the chunks.

    Args:
        forward: A forward that requests means. Its sums are mutated.
        outputs: Of all tokens of its next chunk, which is not appended yet, with their `states`. Mutated.
        count: How many of them, the last ones, get their means.
    """
    spec = forward.output.hidden
    assert spec is not None
    if not forward.computed:
        forward.state_sums = [np.zeros(len(state), np.float64) for state in outputs[0].states]
    tokens = forward.computed
    for left, output in zip(range(len(outputs), 0, -1), outputs, strict=True):
        tokens += 1
        for total, state in zip(forward.state_sums, output.states, strict=True):
            np.add(total, state, out=total)
        output.states = ()
        if left <= count:
            means = [torch.from_numpy(total / tokens) for total in forward.state_sums]
            output.hidden = [encode_row(mean, spec.number_format) for mean in means]
            output.hidden_format = spec.number_format


def _add_experts(
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


def encode_row(row: Tensor, number_format: DataType) -> bytes:
    """One row ([N]) as little-endian numbers, rounded to nearest. In F16, 65520 and more become inf."""
    dtype, same_size, little_endian = _ENCODINGS[number_format]
    bits = row.to(dtype).contiguous().view(same_size).cpu().numpy()
    return bits.astype(little_endian, copy=False).tobytes()


def _some_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """[R, V] -> [n, V]."""
    first, end = rows[0], rows[-1] + 1
    # Usually the rows are contiguous: slicing does not copy them.
    return logits[first:end] if end - first == len(rows) else logits[list(rows)]


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """The logprobs of some tokens. NaN in rows with NaN or +infinity, or only -infinity.

    Args:
        logits: [n, V] floating point. Not modified.
        ids: [n, k] int64, on the same device.

    Returns:
        [n, k] float32.
    """
    if logits.device.type == "cpu" and compiled.available():
        return compiled.log_probabilities(logits.float().contiguous(), ids)
    return _log_softmax(logits.float()).gather(1, ids)


def entropy(logits: Tensor) -> float:
    """The entropy of softmax(logits) in nats, for one row ([V]).

    In float64: the order of sums depends on the CPU, which then hardly ever changes the result in float32.
    """
    shifted = logits.double() - logits.max().double()
    weights = shifted.exp()
    total = weights.sum()
    # Impossible tokens add nothing.
    mean = torch.where(weights > 0, weights * shifted, 0.0).sum() / total
    return max(0.0, float(total.log() - mean))


def _log_softmax(logits: Tensor) -> Tensor:
    """[n, V] float32 -> [n, V], each row independent of the others."""
    vocab = logits.shape[1]
    if logits.is_cuda and vocab % 4:
        # torch splits the sum of a row by its alignment to 16 bytes. Padding gives all rows the same
        # alignment.
        logits = functional.pad(logits, (0, -vocab % 4), value=-math.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab]


def _listed_ids(specs: Sequence[OutputSpec], vocab: int) -> dict[int, list[int]]:
    """The `logprob_token_ids` of each spec, by `id(spec)`: rows of a request share a spec.

    Raises ValueError for an id that is not in the vocabulary.
    """
    listed: dict[int, list[int]] = {}
    for spec in specs:
        if spec.logprob_token_ids and id(spec) not in listed:
            listed[id(spec)] = ids = list(spec.logprob_token_ids)
            if min(ids) < 0 or max(ids) >= vocab:
                raise ValueError(f"logprob_token_ids beyond a vocabulary of {vocab}")
    return listed


def best_ids(logits: Tensor, counts: Sequence[int]) -> list[list[int]]:
    """As `best_k`, for each row, with one top-k and one copy for all of them.

    Args:
        logits: [n, V] floating point, on any device.
        counts: n of them, each at least 1.
    """
    vocab = logits.shape[1]
    width = min(max(counts) + _SPARE_TOP, vocab)
    top = logits.topk(width, dim=-1)
    values, ids = top.values.float().cpu().numpy(), top.indices.cpu().numpy()  # [n, width]
    ids = np.take_along_axis(ids, np.lexsort((ids, -values)), -1)
    best: list[list[int]] = []
    for row, count in enumerate(counts):
        count = min(count, int(np.isfinite(values[row]).sum()))  # noqa: PLW2901 - of possible tokens
        if count and width < vocab and values[row, count - 1] == values[row, -1]:
            # More tokens are equal to the last one than were taken: any of them can have the lowest id.
            best.append(best_k(logits[row].float().cpu().numpy(), count).tolist())
        else:
            best.append(ids[row, :count].tolist())
    return best


def _add_top_ids(
    outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], logits: Tensor, rows: Sequence[int]
) -> None:
    """Set `top_ids` of these rows. The arguments are those of `build_outputs`."""
    if not rows:
        return
    some, counts = _some_rows(logits, rows), [specs[row].top_logprobs for row in rows]
    if logits.is_cuda:
        best = best_ids(some, counts)
    else:
        # On a CPU this is faster than torch's top-k.
        best = [best_k(row, count).tolist() for row, count in zip(some.float().numpy(), counts, strict=True)]
    for row, top_ids in zip(rows, best, strict=True):
        outputs[row].top_ids = top_ids


def _add_logprobs(
    outputs: Sequence[RowOutput],
    specs: Sequence[OutputSpec],
    logits: Tensor,
    rows: Sequence[int],
    listed: Mapping[int, list[int]],
) -> None:
    """Set the logprobs that these rows' specs request, with one gather. `top_ids` must be set."""
    ids = [[outputs[row].token_id, *outputs[row].top_ids, *listed.get(id(specs[row]), ())] for row in rows]
    width = max(map(len, ids))
    index = torch.tensor([own + [0] * (width - len(own)) for own in ids], device=logits.device)  # [n, width]
    found = log_probabilities(_some_rows(logits, rows), index).tolist()
    for row, own, logprobs in zip(rows, ids, found, strict=True):
        output, spec, top = outputs[row], specs[row], 1 + len(outputs[row].top_ids)
        if spec.logprob or spec.top_logprobs:
            output.logprob, *output.top_logprobs = logprobs[:top]
        output.chosen_logprobs = logprobs[top : len(own)]
