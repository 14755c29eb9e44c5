"""The self-check of a loaded model: compares it over pages with a plain forward, on short mixed batches.

Two sequences of random tokens grow by a prefill, a chunk and decodes. Their pages are in random order, and
unused slots hold NaN. The logits of all tokens are compared with a plain forward: one of each whole sequence,
without pages. The caller passes both forwards, so the check works for any model.

**The error** of a row of logits is |difference| / |row|, both after subtracting the mean, which has no effect
on sampling. **In float32** both forwards compute the same sums in a different order. The limit of 1e-4 is
about a hundred times the error of correct models, and holds for every row. **In bfloat16 and float16** both
forwards round at different places (probabilities, partial sums). The errors add up to a few roundings of a
logit; eight are allowed. A router may then choose another expert where two are nearly equal, which changes
the whole row; so the limit holds for the median of the rows. That finds gross errors only. The check in
float32, for which a scaled-down model suffices, finds the others. **Quantised models** also round the inputs
of projections to 8 bits, as many as bfloat16 has. These roundings add to those of the dtype, and so do
the limits: in float32 that of bfloat16 is allowed, in bfloat16 twice as much.

Dimension letters: T tokens of a sequence; R rows of a step; V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from workers.kv.states import FROM_START, Held, StateRun
from workers.models.checkpoint import name_of
from workers.models.errors import ModelError
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.models.model import PAGE_SIZE, Model, new_pages

PlainForward = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [T] int64 on the model's device to logits [T, V], without pages."""

# The tokens of each of the two sequences in each step: a prefill of more than a page and a short one, a chunk
# and a decode, a decode and a chunk, and decodes.
_STEPS = ((21, 5), (9, 1), (1, 8), (1, 1), (1, 1))
_FLOAT32_TOLERANCE = 1e-4
_ALLOWED_ROUNDINGS = 8


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error that rounding in this dtype explains; see the module's docstring."""
    return _FLOAT32_TOLERANCE if dtype == torch.float32 else _ALLOWED_ROUNDINGS * torch.finfo(dtype).eps


def check_parity(
    model: Model,
    plain: PlainForward,
    *,
    what: str,
    vocab_size: int,
    max_seq_len: int,
    rounds_rows: bool = False,
) -> float:
    """Compare a model over pages with its plain forward.

    Args:
        model: The model under test.
        plain: The plain forward, which gives the expected logits.
        what: The name of the model in messages.
        vocab_size: V; tokens are drawn from all of it.
        max_seq_len: The longest sequence that the model takes.
        rounds_rows: Whether both forwards also round the inputs of projections to 8 bits.

    Returns:
        The relative error.

    Raises:
        ModelError: The error is not a number, or larger than roundings explain: see the module's docstring.
    """
    sequences = _random_sequences(vocab_size, max_seq_len)
    allowed = tolerance(model.dtype) + (tolerance(torch.bfloat16) if rounds_rows else 0.0)
    with torch.inference_mode():
        found = torch.cat(_run_paged(model, sequences))
        expected = torch.cat([plain(torch.tensor(tokens, device=model.device)) for tokens in sequences])
    row_errors = _row_errors(found, expected)
    # If any row is NaN, `max` and `median` are NaN, which is refused.
    is_exact = model.dtype == torch.float32 and not rounds_rows
    error = (row_errors.max() if is_exact else row_errors.median()).item()
    if not math.isfinite(error):
        raise ModelError(f"{what}: {_why_not_comparable(found, expected)}")
    if not error <= allowed:
        also = " and of rows to 8 bits" if rounds_rows else ""
        raise ModelError(
            f"{what}: over pages it differs from its plain forward by {error:.1e}; rounding in"
            f" {name_of(model.dtype)}{also} explains at most {allowed:.1e}:"
            " the results would be wrong"
        )
    return error


def _random_sequences(vocab_size: int, max_seq_len: int) -> list[list[int]]:
    """Two sequences of random tokens, as long as the sum of the steps, or as the model's limit."""
    dice = random.Random(0)
    lengths = (min(max_seq_len, sum(step[i] for step in _STEPS)) for i in range(2))
    return [[dice.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _run_paged(model: Model, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The logits of all tokens of each sequence, [T, V] each."""
    pages = [-(-len(tokens) // PAGE_SIZE) for tokens in sequences]
    shuffled = random.Random(1).sample(range(1, sum(pages) + 2), sum(pages))  # page 0 is unused
    owned = [shuffled[: pages[0]], shuffled[pages[0] :]]
    kv = new_pages(model, sum(pages) + 2)
    for index in range(kv.num_layers):
        for half in kv.layer(index):
            half.data.fill_(torch.nan)
    for tensor in kv.states.tensors if kv.states is not None else ():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    lengths, rows = [0, 0], [[], []]  # type: tuple[list[int], list[list[torch.Tensor]]]
    states = [FROM_START, FROM_START]
    for number, step in enumerate(_STEPS):
        parts = [min(step[i], len(sequences[i]) - lengths[i]) for i in range(2)]
        taken = [i for i in range(2) if parts[i]]
        if not taken:
            break
        ends = [lengths[i] + parts[i] for i in range(2)]
        inputs = _pack([(sequences[i], owned[i], lengths[i], ends[i]) for i in taken]).to(model.device)
        if kv.states is not None:
            # Each sequence has two slots, and writes them in turn.
            written = [Held(end, 2 * i + number % 2) for i, end in enumerate(ends)]
            inputs.states = [StateRun(states[i], (), (written[i],)) for i in taken]
            states = written
        logits = model.logits(model.forward(inputs, kv))  # [R, V]
        for i, part in zip(taken, torch.split(logits, [parts[i] for i in taken]), strict=True):
            rows[i].append(part)
        lengths = ends
    return [torch.cat(parts) for parts in rows]


def _pack(items: Sequence[tuple[list[int], list[int], int, int]]) -> ForwardInputs:
    """One batch of items (tokens, pages, begin and end of the range to run), with all rows wanted."""
    positions = [range(begin, end) for _, _, begin, end in items]
    query_lens, contexts = [len(found) for found in positions], [end for *_, end in items]
    widest = max(len(pages) for _, pages, _, _ in items)
    slots = [
        pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for (_, pages, _, _), found in zip(items, positions, strict=True)
        for position in found
    ]
    return ForwardInputs(
        token_ids=torch.tensor([token for tokens, _, begin, end in items for token in tokens[begin:end]]),
        positions=torch.tensor([position for found in positions for position in found]),
        slots=torch.tensor(slots),
        wanted_rows=torch.arange(sum(query_lens)),
        attention=AttentionBatch(
            page_tables=torch.tensor(
                [pages + [0] * (widest - len(pages)) for _, pages, _, _ in items], dtype=torch.int32
            ),
            query_starts=torch.tensor([0, *query_lens]).cumsum(0).int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            query_lens=query_lens,
            context_lens_host=contexts,
        ),
    )


def _why_not_comparable(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Why the error of rows [T, V] against rows [T, V] of the plain forward is not finite."""
    if expected.isfinite().all():
        if not found.isfinite().all():
            return (
                "over pages its logits are not finite, those of its plain forward are:"
                " the results would be wrong"
            )
        if (expected == expected[:, :1]).all(-1).any():
            return "its plain forward gives equal logits to all tokens, as with weights that are all zero"
    dtype = name_of(expected.dtype)
    return f"the logits of its plain forward are not finite in {dtype}, as with weights that are too large"


def _row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[T] relative errors of rows [T, V]."""
    found, expected = (rows.float() - rows.float().mean(-1, keepdim=True) for rows in (found, expected))
    errors: torch.Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors
