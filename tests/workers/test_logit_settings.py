"""Masks and histories are read once for all rows of a request, and give what each row alone would."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import types_pb2

from tests.masks import forms
from tests.workers.gateway_end import forward_command
from workers import wire
from workers.batch import sampling_rows
from workers.common import worker_pb2
from workers.forward_options import ModelSizes
from workers.kv.table import KvTable
from workers.logit_settings import Masks
from workers.numpy_choice import adjusted
from workers.operations import Chunk, Forward
from workers.outputs import OutputSpec, Sampling, TokenMask
from workers.sampling import RowChoices, SamplingRow, choose_tokens

VOCAB = 12


def allowed_by(mask: TokenMask) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(Masks(VOCAB).packed(mask), count=VOCAB, bitorder="little")
    return np.flatnonzero(bits).tolist()


@given(
    history=st.lists(st.integers(0, VOCAB + 2), max_size=30),
    prompt_len=st.integers(0, 30),
    length=st.integers(0, 30),
    path=st.lists(st.integers(0, VOCAB + 2), max_size=3),
)
def test_penalties_count_what_is_before_the_row(
    history: list[int], prompt_len: int, length: int, path: list[int]
) -> None:
    """With compiled code and without: tokens known and unknown, on a path or not."""
    before = [*history[:length], *path]
    spec = Sampling(frequency_penalty=0.5, repetition_penalty=2.0)
    row = SamplingRow(
        spec, history=history, prompt_len=prompt_len, history_len=min(length, len(history)), path=path
    )
    counts = Counter(before[prompt_len:])
    expected = [(0.5 if token in before else 1.0) - 0.5 * counts[token] for token in range(VOCAB)]
    assert adjusted(np.ones(VOCAB, np.float32), RowChoices(VOCAB).choice(row)).tolist() == expected
    likely = max(range(VOCAB), key=lambda token: (expected[token], -token))
    assert choose_tokens(torch.ones(1, VOCAB), [row]).tolist() == [likely]


class CountedIds(tuple[int, ...]):
    """Token ids that note how often they are gone through."""

    __slots__ = ()
    reads = 0

    def __iter__(self) -> Iterator[int]:
        type(self).reads += 1
        return super().__iter__()


def test_a_mask_is_read_once_however_many_rows_have_it() -> None:
    ids = CountedIds([3, 5] * 1000)
    mask = TokenMask(allowed=ids)
    assert choose_tokens(torch.zeros(256, VOCAB), [SamplingRow(mask=mask)] * 256).tolist() == [3] * 256
    assert CountedIds.reads == 1


def test_masks_are_told_apart() -> None:
    rows = [SamplingRow(mask=TokenMask(allowed=[token])) for token in (4, 2, 4, 7)]
    assert choose_tokens(torch.zeros(4, VOCAB), rows).tolist() == [4, 2, 4, 7]
    packed = np.packbits([1, 0] * 6, bitorder="little").tobytes()
    assert allowed_by(TokenMask(packed=packed)) == [*range(0, VOCAB, 2)]
    assert allowed_by(TokenMask(packed=b"\x01")) == [0]


def test_rows_of_a_scoring_share_their_history() -> None:
    """One copy of it for each row would cost tokens x rows."""
    table = KvTable(16)
    sequence = table.create(1)
    tokens = [number % 7 for number in range(200)]
    table.reserve(sequence, 200)
    table.append(sequence, tokens[:100])
    spec = Sampling(frequency_penalty=0.5, repetition_penalty=1.3)
    op = Forward(1, 1, 0, tokens, rows=200, output=OutputSpec(sampling=spec), prompt_len=50)
    op.kv, op.computed = sequence, 100
    rows = sampling_rows([Chunk(op, 100, 100)])
    assert len(rows) == 100 and len({id(row.history) for row in rows}) == 1
    logits = torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(5))
    alone = [
        SamplingRow(spec, position=101 + i, history=tokens[: 101 + i], prompt_len=50) for i in range(100)
    ]
    expected = [int(choose_tokens(logits[i : i + 1], [row])[0]) for i, row in enumerate(alone)]
    assert choose_tokens(logits, rows).tolist() == expected


def forward_with(mask: types_pb2.TokenMask) -> worker_pb2.WorkerCommand:
    options = worker_pb2.ForwardOptions(rows=1, output=types_pb2.OutputOptions(mask=mask))
    return forward_command(1, 1, [1], "DECODE", options=options.SerializeToString())


def test_the_wire_makes_bits_of_a_list() -> None:
    message = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[3, 9, 3, 2**31]))
    command = wire.to_command(forward_with(message), ModelSizes(VOCAB))
    assert isinstance(command, Forward) and command.output.mask is not None
    assert allowed_by(command.output.mask) == [3, 9]
    nothing = wire.to_command(forward_with(types_pb2.TokenMask()), ModelSizes(VOCAB))
    assert isinstance(nothing, Forward) and nothing.output.mask is not None
    assert not allowed_by(nothing.output.mask)


@given(allowed=st.sets(st.integers(0, VOCAB - 1)), stray_bits=st.integers(0, 255), words=st.booleans())
def test_the_wire_makes_the_same_bits_of_any_form(allowed: set[int], stray_bits: int, *, words: bool) -> None:
    for mask in forms(allowed, VOCAB, stray_bits, words=words):
        command = wire.to_command(forward_with(mask), ModelSizes(VOCAB))
        assert isinstance(command, Forward) and command.output.mask is not None
        found = allowed_by(command.output.mask)
        assert found == sorted(allowed), mask.WhichOneof("kind")


@pytest.mark.parametrize(
    "mask",
    [
        types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[1] * (VOCAB + 1))),
        types_pb2.TokenMask(forbidden=types_pb2.TokenIds(ids=[1] * (VOCAB + 1))),
        types_pb2.TokenMask(deflated=zlib.compress(bytes(1 << 20))),
        types_pb2.TokenMask(deflated=b"garbage"),
        # More than fills the last word of 32 bits.
        types_pb2.TokenMask(packed=b"\xff" * 5),
    ],
)
def test_the_wire_refuses_what_is_no_mask_of_the_vocabulary(mask: types_pb2.TokenMask) -> None:
    with pytest.raises(ValueError, match=r"a mask (of|that)"):
        wire.to_command(forward_with(mask), ModelSizes(VOCAB))
