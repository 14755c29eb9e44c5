"""Makes the results of forwards from the rows of a step, beside the tokens that are appended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from workers.batch import score_targets
from workers.decodes import Decodes
from workers.distribution import sampled_logprobs
from workers.extra_samples import draw_extra_samples
from workers.models.capture import RowCapture
from workers.operations import Chunk, Forward
from workers.outputs import OutputSpec, RowOutput
from workers.row_outputs import TokenScores, build_outputs, score_tokens
from workers.runners.base import StepResult
from workers.sampling import SamplingRow


def row_outputs(
    logits: torch.Tensor, chosen: torch.Tensor, rows: Sequence[SamplingRow], specs: Sequence[OutputSpec]
) -> list[RowOutput]:
    """What the specs request of each row, without captured hidden states and experts."""
    outputs = build_outputs(logits, chosen, specs)
    tokens = [output.token_id for output in outputs]
    for row, logprob in sampled_logprobs(logits, tokens, rows, specs).items():
        outputs[row].sampled_logprob = logprob
    return outputs


def without_failed(
    chunks: Sequence[Chunk],
    decodes: Decodes,
    result: StepResult,
    rows: Sequence[SamplingRow],
    specs: Sequence[OutputSpec],
    capture: RowCapture | None,
) -> tuple[list[Chunk], Decodes, StepResult, list[SamplingRow], list[OutputSpec]]:
    """A step's data without items that have a failed row. Sets their `failure` or `failures`."""
    first, failed = decodes.size, result.failed
    decodes.failures = {row: error for row, error in failed.items() if row < first}
    kept = [row for row in range(first) if row not in failed]
    is_kept = np.array([row not in failed for row in range(first)], np.bool_)
    good: list[Chunk] = []
    for chunk in chunks:
        own = range(first, first + chunk.rows)
        chunk.forward.failure = next((failed[row] for row in own if row in failed), None)
        if chunk.forward.failure is None:
            good.append(chunk)
            kept += own
        first += chunk.rows
    if capture is not None:
        capture.keep(kept)
    hidden = None if result.hidden is None else result.hidden[kept]
    left = StepResult(result.logits[kept], result.chosen[kept], hidden=hidden)
    return (
        good,
        decodes.take(is_kept),
        left,
        [rows[row] for row in kept],
        [specs[row] for row in kept if specs],
    )


def scores_of(chunks: Sequence[Chunk], logits: torch.Tensor) -> dict[Forward, tuple[list[int], TokenScores]]:
    """By forward: the indexes of the tokens that its chunk scores, and their scores."""
    found: dict[Forward, tuple[list[int], TokenScores]] = {}
    first = 0
    for chunk in chunks:
        indexes, rows = score_targets(chunk) if chunk.forward.scored else ([], [])
        if indexes:
            targets = torch.tensor([chunk.forward.token_ids[index] for index in indexes])
            # Usually the rows are contiguous: slicing does not copy them.
            is_contiguous = rows[-1] - rows[0] + 1 == len(rows) and not chunk.forward.parents
            picked = slice(first + rows[0], first + rows[-1] + 1)
            scores = score_tokens(
                logits[picked] if is_contiguous else logits[[first + row for row in rows]], targets
            )
            found[chunk.forward] = indexes, scores
        first += chunk.rows
    return found


def draws_of(
    chunks: Sequence[Chunk], logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> dict[Forward, Iterator[tuple[int, list[RowOutput]]]]:
    """By forward: the iterator that draws its extra samples, if the chunk has the forward's last row."""
    draws: dict[Forward, Iterator[tuple[int, list[RowOutput]]]] = {}
    last = -1
    for chunk in chunks:
        forward = chunk.forward
        last += chunk.rows
        if forward.sample_seeds and chunk.output_rows:
            # A copy: the next step writes to the memory of the logits.
            row = logits[last].to(torch.float32, copy=True)
            draws[chunk.forward] = draw_extra_samples(row, rows[last], forward.sample_seeds, forward.output)
    return draws


def accepted_drafts(forward: Forward) -> int:
    """The number of drafts before the first one that differs from the token chosen at its position."""
    accepted = 0
    for draft, output in zip(forward.token_ids[1:], forward.outputs, strict=False):
        if draft != output.token_id:
            break
        accepted += 1
    return accepted
