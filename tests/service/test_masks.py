"""Masks in every form: judged alike, and nothing hostile in a deflated one takes time or memory."""

from __future__ import annotations

import math
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2, types_pb2

from service.api.append_codec import held_bytes
from service.api.calls import CALLS
from service.api.masks import check_choice
from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument
from tests.masks import forms

VOCAB = 61
LIMITS = RequestLimits(VOCAB, 1 << 20)
LARGE = RequestLimits(150_001, 1 << 20)
PACKED_BYTES = (LARGE.vocab_size + 7) // 8


def refusal_of(
    mask: types_pb2.TokenMask | None, limits: RequestLimits = LIMITS, forbidden: set[int] | None = None
) -> tuple[str, str] | None:
    sampling = types_pb2.SamplingParams(logit_bias=dict.fromkeys(forbidden or (), -math.inf))
    try:
        check_choice(mask, sampling, limits)
    except InvalidArgument as error:
        return error.reason, error.field
    return None


@given(
    allowed=st.sets(st.integers(0, VOCAB - 1)) | st.just(set(range(VOCAB))),
    forbidden=st.sets(st.integers(0, VOCAB - 1)) | st.just(set(range(VOCAB))),
    stray_bits=st.integers(0, 255),
    words=st.booleans(),
)
def test_the_same_set_is_judged_alike(
    allowed: set[int], forbidden: set[int], stray_bits: int, *, words: bool
) -> None:
    for mask in forms(allowed, VOCAB, stray_bits, words=words):
        refused = refusal_of(mask, forbidden=forbidden)
        assert (refused is None) == bool(allowed - forbidden), mask.WhichOneof("kind")
        assert refused is None or refused[0] == "BAD_MASK"
    assert (refusal_of(None, forbidden=forbidden) is None) == (len(forbidden) < VOCAB)


@pytest.mark.parametrize("size", [PACKED_BYTES + 3, PACKED_BYTES - 1, 1 << 20, 1 << 26])
def test_what_inflates_to_another_size_is_refused_within_bounds(size: int) -> None:
    """Also a bomb: nothing beyond a mask is ever made of it."""
    stream = zlib.compressobj()
    piece = bytes(1 << 20)
    deflated = b"".join(stream.compress(piece) for _ in range(size >> 20))
    deflated += stream.compress(bytes(size & 0xFFFFF)) + stream.flush()
    mask = types_pb2.TokenMask(deflated=deflated)
    tracemalloc.start()
    try:
        assert refusal_of(mask, LARGE) == ("BAD_MASK", "output.mask.deflated")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The stream's copy beside what is inflated, which may grow by doubling.
    assert peak_bytes < len(deflated) + 4 * PACKED_BYTES + (1 << 16)


def whole() -> bytes:
    return zlib.compress(b"\xff" * PACKED_BYTES)


@pytest.mark.parametrize(
    "deflated",
    [
        b"",
        b"garbage",
        whole()[:-1],
        whole()[:10],
        whole() + b"\0",
        whole() + whole(),
        whole()[:-4] + b"\0\0\0\0",
        whole()[2:],
        zlib.compress(b""),
        # Raw, and gzip's: other formats.
        zlib.compressobj(wbits=-15).flush(),
        zlib.compressobj(wbits=31).flush(),
        zlib.compressobj(zdict=b"\xff" * 100).flush(),
    ],
)
def test_what_is_no_whole_stream_is_refused(deflated: bytes) -> None:
    mask = types_pb2.TokenMask(deflated=deflated)
    assert refusal_of(mask, LARGE) == ("BAD_MASK", "output.mask.deflated")
    assert refusal_of(types_pb2.TokenMask(deflated=whole()), LARGE) is None


def test_bits_that_cannot_be_compressed_pass() -> None:
    packed = random.Random(1).randbytes(PACKED_BYTES)
    for level in (0, 1, 9):
        assert refusal_of(types_pb2.TokenMask(deflated=zlib.compress(packed, level)), LARGE) is None


async def test_what_masks_become_is_counted_with_the_call() -> None:
    """Else a few kilobytes could be gigabytes in a worker."""
    packed, allowed, deflated, forbidden = forms(set(range(1000)), LARGE.vocab_size, words=True)
    grows_by = {"packed": 0, "allowed": 1, "deflated": 1, "forbidden": 1}

    def held(method: str, request: object) -> int:
        return held_bytes([CALLS[method].check(request, LARGE, None)])

    for mask in (packed, allowed, deflated, forbidden):
        output = types_pb2.OutputOptions(mask=mask)
        plain = executor_pb2.DecodeRequest(cache_id="a", token_id=1)
        masked = executor_pb2.DecodeRequest(cache_id="b", token_id=1, output=output)
        size_bytes = grows_by[mask.WhichOneof("kind") or ""] * len(packed.packed)
        least = held("Decode", plain)
        assert held("Decode", masked) == least + size_bytes
        batch = executor_pb2.BatchDecodeRequest(items=[plain, masked])
        assert (
            held_bytes(await CALLS["BatchDecode"].check_items(batch, LARGE, None)) == 2 * least + size_bytes
        )
        row = types_pb2.VerifyRow(mask=mask)
        verify = executor_pb2.ForwardVerifyRequest(
            cache_id="a", token_ids=[1, 2], rows=[row, row], accept=types_pb2.VERIFY_ACCEPT_ALL
        )
        of_rows = held("ForwardVerify", verify)
        del verify.rows[:]
        alone = held("ForwardVerify", verify)
        assert of_rows == alone + 2 * size_bytes
