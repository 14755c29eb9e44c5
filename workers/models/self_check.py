"""A load that proves itself: a model over pages against its own plain forward, on a short mixed batch.

Two texts grow together by a prefill, a chunk, decodes, over pages in shuffled order whose unused slots
hold NaN. What every token then says is compared with a forward of each whole text without pages. The
caller gives both sides, so it serves for any model.

**The error** of a row of logits is the length of the difference over the length of the row, both without
their mean, which no choice of a token depends on. **In float32** both sides do the same sums in another
order: 1e-4 is about a hundred times what models show, and every row has to keep to it. **In bfloat16 and
float16** each layer rounds, and the two sides round differently (probabilities, partial sums), which adds
up to a few roundings of a logit: eight are allowed. A router that stands between two experts may then take
another one, which changes that row wholly, so it is the middle one of the rows that has to keep to it.
Such a check sees what is grossly wrong; for the rest there is the one in float32, for which a small copy
of the model suffices.

Dimension letters: T tokens of a text; R rows of a step; V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.models.inputs import AttentionBatch, ForwardInputs
from workers.models.model import Model

Plain = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [T] int64 on the model's device to logits [T, V], without pages."""

_PAGE_SIZE = 16
# How many tokens each of the two texts gets, step by step: a prefill of more than a page beside a short one,
# a chunk beside a decode, the other way round, and decodes.
_STEPS = ((21, 5), (9, 1), (1, 8), (1, 1), (1, 1))
_STRICT = 1e-4
_ROUNDINGS = 8


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error that `prove` takes for rounding; see the module."""
    return _STRICT if dtype == torch.float32 else _ROUNDINGS * torch.finfo(dtype).eps


def prove(
    model: Model,
    layers: Sequence[LayerKv],
    plain: Plain,
    *,
    what: str,
    vocab_size: int,
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Compare a model over pages with its plain forward.

    Args:
        model: Under test.
        layers: The shape of its pages.
        plain: What it is to compute.
        what: Names it in the message.
        vocab_size: V; tokens are drawn from all of it.
        max_seq_len: The longest text it takes.
        dtype: Of weights, keys and values.
        device: Where it is.

    Returns:
        The relative error.

    Raises:
        ModelError: The error is above `tolerance(dtype)`, or not a number.
    """
    texts = _texts(vocab_size, max_seq_len)
    with torch.inference_mode():
        paged = _run_paged(model, layers, texts, dtype, device)
        expected = torch.cat([plain(torch.tensor(text, device=device)) for text in texts])
    found = torch.cat(paged)
    of_rows = _row_errors(found, expected)
    # NaN has to count as the worst: `max` and `median` give it where there is one.
    error = (of_rows.max() if dtype == torch.float32 else of_rows.median()).item()
    if not math.isfinite(error):
        raise ModelError(f"{what}: {_why_no_number(found, expected)}")
    if not error <= tolerance(dtype):
        raise ModelError(
            f"{what}: over pages it differs from its plain forward by {error:.1e}, of which rounding in"
            f" {str(dtype).removeprefix('torch.')} explains {tolerance(dtype):.1e}: it would answer wrongly"
        )
    return error


def _texts(vocab_size: int, max_seq_len: int) -> list[list[int]]:
    """Two texts of random tokens, as long as the steps make them, or as the model takes."""
    dice = random.Random(0)
    lengths = (min(max_seq_len, sum(step[i] for step in _STEPS)) for i in range(2))
    return [[dice.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _run_paged(
    model: Model,
    layers: Sequence[LayerKv],
    texts: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The logits of every token of each text, [T, V] each."""
    pages = [-(-len(text) // _PAGE_SIZE) for text in texts]
    shuffled = random.Random(1).sample(range(1, sum(pages) + 2), sum(pages))  # page 0 is nobody's
    owned = [shuffled[: pages[0]], shuffled[pages[0] :]]
    kv = KvTensors(layers, num_pages=sum(pages) + 2, page_size=_PAGE_SIZE, dtype=dtype, device=device)
    for index in range(kv.num_layers):
        for half in kv.layer(index):
            half.fill_(torch.nan)
    lengths, rows = [0, 0], [[], []]  # type: tuple[list[int], list[list[torch.Tensor]]]
    for step in _STEPS:
        parts = [min(step[i], len(texts[i]) - lengths[i]) for i in range(2)]
        taken = [i for i in range(2) if parts[i]]
        if not taken:
            break
        ends = [lengths[i] + parts[i] for i in range(2)]
        inputs = _pack([(texts[i], owned[i], lengths[i], ends[i]) for i in taken]).to(device)
        logits = model.logits(model.forward(inputs, kv))  # [R, V]
        for i, part in zip(taken, torch.split(logits, [parts[i] for i in taken]), strict=True):
            rows[i].append(part)
        lengths = ends
    return [torch.cat(parts) for parts in rows]


def _pack(items: Sequence[tuple[list[int], list[int], int, int]]) -> ForwardInputs:
    """One batch of items (text, its pages, first and last token), every row wanted."""
    positions = [range(begin, end) for _, _, begin, end in items]
    query_lens, contexts = [len(found) for found in positions], [end for *_, end in items]
    widest = max(len(pages) for _, pages, _, _ in items)
    slots = [
        pages[position // _PAGE_SIZE] * _PAGE_SIZE + position % _PAGE_SIZE
        for (_, pages, _, _), found in zip(items, positions, strict=True)
        for position in found
    ]
    return ForwardInputs(
        token_ids=torch.tensor([token for text, _, begin, end in items for token in text[begin:end]]),
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


def _why_no_number(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Why rows [T, V] cannot be compared with rows [T, V] of the plain forward."""
    if expected.isfinite().all():
        if not found.isfinite().all():
            return "over pages it gives what is no number, unlike its plain forward: it would answer wrongly"
        if (expected == expected[:, :1]).all(-1).any():
            return "its plain forward finds all tokens equally likely, as with weights that are all zero"
    dtype = str(expected.dtype).removeprefix("torch.")
    return f"its plain forward gives what is no number in {dtype}, as with weights that are too large"


def _row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[T] relative errors of rows [T, V]."""
    found, expected = (rows.float() - rows.float().mean(-1, keepdim=True) for rows in (found, expected))
    errors: torch.Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors
