"""Masks and hidden states in the Python client: a mask's smallest form, rows of numbers without numpy."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire import floats, output_options, token_mask
from quire.v1 import types_pb2

from service.api.masks import check_choice
from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument

VOCAB = 150_001


def packed_of(allowed: set[int], vocab_size: int, stray: int, *, words: bool) -> bytes:
    size = (vocab_size + 31) // 32 * 4 if words else (vocab_size + 7) // 8
    bits = np.zeros(8 * size, dtype=np.bool_)
    bits[list(allowed)] = True
    bits[vocab_size:] = stray
    return np.packbits(bits, bitorder="little").tobytes()


def allowed_in(mask: types_pb2.TokenMask, vocab_size: int) -> set[int]:
    """Read by the words of the API alone."""
    check_choice(mask, types_pb2.SamplingParams(), RequestLimits(vocab_size, 1 << 20))
    match mask.WhichOneof("kind"):
        case "allowed":
            return set(mask.allowed.ids)
        case "forbidden":
            return set(range(vocab_size)) - set(mask.forbidden.ids)
        case kind:
            packed = mask.packed if kind == "packed" else zlib.decompress(mask.deflated)
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=vocab_size, bitorder="little")
            return set(np.flatnonzero(bits).tolist())


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(400, 3000),
    share=st.sampled_from(["few", "most", "half", "runs", "all"]),
    stray=st.integers(0, 1),
    words=st.booleans(),
)
def test_whatever_form_is_sent_says_the_same(
    seed: int, vocab_size: int, share: str, stray: int, *, words: bool
) -> None:
    """Also with bits behind the vocabulary, which mean nothing and must not become ids."""
    dice, everything = random.Random(seed), range(vocab_size)
    few = set(dice.sample(everything, dice.randint(1, 200)))
    allowed = {
        "few": few,
        "most": set(everything) - few,
        "half": set(dice.sample(everything, vocab_size // 2)),
        "runs": set(range(dice.randrange(300), vocab_size - dice.randrange(50))),
        "all": set(everything),
    }[share]
    packed = packed_of(allowed, vocab_size, stray, words=words)
    mask = token_mask(packed)
    assert allowed_in(mask, vocab_size) == allowed
    assert mask.ByteSize() <= types_pb2.TokenMask(packed=packed).ByteSize()


def test_the_form_is_the_small_one() -> None:
    dice = random.Random(1)
    everything = set(range(VOCAB))
    forms = {
        "allowed": set(dice.sample(range(VOCAB - 32), 100)),
        "deflated": everything - set(dice.sample(range(VOCAB - 32), 100)),
        "packed": set(dice.sample(range(VOCAB), VOCAB // 2)),
    }
    for kind, allowed in forms.items():
        packed = packed_of(allowed, VOCAB, 1 if kind == "deflated" else 0, words=True)
        mask = token_mask(bytearray(packed))
        assert mask.WhichOneof("kind") == kind
        if kind != "packed":
            assert mask.ByteSize() < len(packed) / 10
        # Who has chosen a form keeps it.
        chosen = types_pb2.TokenMask(packed=packed)
        assert token_mask(chosen) == chosen == output_options(allowed=chosen).mask


@pytest.mark.parametrize("words", [False, True])
def test_a_mask_for_fewer_tokens_does_not_allow_the_others(words: bool) -> None:
    """As tokenizers make them, which may have fewer tokens than the model."""
    made_for = VOCAB - 300
    most = packed_of(set(range(50, made_for)), made_for, 1, words=words)
    with pytest.raises(InvalidArgument, match="one bit for each token takes"):
        allowed_in(token_mask(most), VOCAB)
    few = packed_of({5, 99}, made_for, 0, words=words)
    assert allowed_in(token_mask(few), VOCAB) == {5, 99}


def test_an_array_that_may_be_a_mask_is_not_taken_for_ids() -> None:
    """Grammar libraries fill int32 words; most of them are 0, which as ids would allow token 0 alone."""
    packed = packed_of({5, 40}, 96, 0, words=True)
    words = np.frombuffer(packed, np.int32)
    bits = np.ones(96, np.bool_)
    for array in (words, words[None], np.frombuffer(packed, np.uint8), bits, torch.tensor(words)):
        with pytest.raises(TypeError, match=r"row\.tobytes\(\), or ids\.tolist\(\)"):
            output_options(allowed=array)
    for mask in (words.tobytes(), words.data, torch.tensor(words).numpy().tobytes()):
        assert token_mask(mask) == types_pb2.TokenMask(packed=packed)
    for ids in ([5, 40], {5, 40}, range(5, 41, 35), np.array([5, 40]), torch.tensor([5, 40])):
        assert sorted(token_mask(ids).allowed.ids) == [5, 40]


def test_how_hidden_states_are_asked_for() -> None:
    assert not output_options().HasField("hidden")
    last = output_options(hidden=True).hidden
    assert list(last.layers) == [] and last.dtype == types_pb2.DATA_TYPE_F32
    some = output_options(hidden=[4, 0, 4], hidden_format="bf16").hidden
    assert list(some.layers) == [4, 0, 4] and some.dtype == types_pb2.DATA_TYPE_BF16
    with pytest.raises(ValueError, match="hidden_format is one of f32, bf16, f16"):
        output_options(hidden=True, hidden_format="f64")


def test_rows_of_numbers_in_any_format() -> None:
    numbers = [0.0, -1.5, 3.25, -512.0, 0.125, float("inf")]
    assert len(numbers) == 6
    wide = struct.pack("<6f", *numbers)
    formats = {
        types_pb2.DATA_TYPE_F32: wide,
        types_pb2.DATA_TYPE_F16: struct.pack("<6e", *numbers),
        types_pb2.DATA_TYPE_BF16: b"".join(wide[at + 2 : at + 4] for at in range(0, 24, 4)),
    }
    for dtype, data in formats.items():
        row = floats(types_pb2.Tensor(dtype=dtype, shape=[6], data=data))
        assert row.typecode == "f" and list(row) == numbers
    with pytest.raises(ValueError, match="6 elements in a row"):
        floats(types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_F32, shape=[7], data=wide))
    with pytest.raises(ValueError, match="a tensor of elements 0"):
        floats(types_pb2.Tensor(shape=[6], data=wide))
