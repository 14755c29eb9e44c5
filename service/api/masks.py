"""Checks token masks, which are passed on to the worker as they were sent.

A mask that was sent compressed or as a list is expanded to bits in the worker, where it may be many times as
large. Here it is expanded only during the check. The size of the bits counts in the call's memory, see
`bytes_in_worker`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

from quire.v1 import types_pb2

from service.api.request_limits import RequestLimits
from service.errors import InvalidArgument

# How many bytes a zlib stream may have beyond an incompressible mask: several times what zlib adds.
_STREAM_BYTES = 1 << 10


def check_choice(
    mask: types_pb2.TokenMask | None, sampling: types_pb2.SamplingParams, limits: RequestLimits
) -> None:
    """Checks that a mask fits the vocabulary, and that mask and biases leave at least one token allowed.

    `mask` is None if there is none. Raises InvalidArgument.
    """
    biases = sampling.logit_bias.items()
    # `validation` checks that all of them are tokens.
    forbidden = {t for t, bias in biases if bias == -math.inf and t < limits.vocab_size}
    if mask is None:
        if len(forbidden) >= limits.vocab_size:
            raise _bad("every token is forbidden", "output.sampling.logit_bias")
        return
    match mask.WhichOneof("kind"):
        case "packed":
            left = _choices_in_bits(_sized(mask.packed, "packed", limits), forbidden, limits)
        case "deflated":
            left = _choices_in_bits(_inflated(mask.deflated, limits), forbidden, limits)
        case "allowed":
            if not mask.allowed.ids:
                raise _bad("no token is allowed", "output.mask.allowed")
            _check_ids(mask.allowed.ids, "allowed", limits)
            left = not forbidden or any(token not in forbidden for token in mask.allowed.ids)
        case "forbidden":
            if mask.forbidden.ids:
                _check_ids(mask.forbidden.ids, "forbidden", limits)
            most = len(forbidden) + len(mask.forbidden.ids)
            # Counting distinct ids is needed only if the lengths add up to the vocabulary size.
            left = most < limits.vocab_size or len(forbidden.union(mask.forbidden.ids)) < limits.vocab_size
        case _:
            raise _bad("one of packed, allowed, deflated and forbidden is required", "output.mask")
    if not left:
        raise _bad("every token is forbidden", "output.mask")


def shortened(mask: types_pb2.TokenMask, limits: RequestLimits) -> types_pb2.TokenMask:
    """A valid mask in its smaller form: as it is, or as bits. Masks may be sent with each token."""
    kind = mask.WhichOneof("kind")
    size_bytes = -(-limits.vocab_size // 8)
    if kind not in ("allowed", "forbidden") or mask.ByteSize() <= size_bytes:
        return mask
    bits = bytearray(size_bytes) if kind == "allowed" else bytearray(b"\xff") * size_bytes
    for token_id in frozenset(getattr(mask, kind).ids):
        bits[token_id >> 3] ^= 1 << (token_id & 7)
    return types_pb2.TokenMask(packed=bytes(bits))


def bytes_in_worker(masks: Iterable[types_pb2.TokenMask], limits: RequestLimits) -> int:
    """The memory in a worker that valid masks need beyond the request, in bytes."""
    return sum(_word_bytes(limits) for mask in masks if mask.WhichOneof("kind") not in ("packed", None))


def _word_bytes(limits: RequestLimits) -> int:
    """The size of a mask in words of 32 bits, the form of compiled grammars, in bytes."""
    return (limits.vocab_size + 31) // 32 * 4


def _sized(packed: bytes, kind: str, limits: RequestLimits) -> bytes:
    needed = (limits.vocab_size + 7) // 8
    if len(packed) not in (needed, _word_bytes(limits)):
        text = f"has {len(packed)} bytes, but one bit for each token takes {needed}"
        raise _bad(text, f"output.mask.{kind}")
    return packed


def _inflated(deflated: bytes, limits: RequestLimits) -> bytes:
    """Decompresses a mask. Stops at the size of a mask."""
    field, most = "output.mask.deflated", _word_bytes(limits)
    if len(deflated) > most + _STREAM_BYTES:
        raise _bad(f"has {len(deflated)} bytes, more than a packed mask, which takes {most}", field)
    stream = zlib.decompressobj()
    try:
        # One byte more, so that the end of the stream is read.
        packed = stream.decompress(deflated, most + 1)
    except zlib.error:
        raise _bad("is not a zlib stream", field) from None
    if len(packed) > most:
        raise _bad(f"inflates to more than {most} bytes, the size of a mask", field)
    if not stream.eof:
        raise _bad("the zlib stream ends early", field)
    if stream.unused_data:
        raise _bad("there are bytes after the zlib stream", field)
    return _sized(packed, "deflated", limits)


def _check_ids(ids: Sequence[int], kind: str, limits: RequestLimits) -> None:
    check_num_ids(len(ids), kind, limits.vocab_size)
    check_vocabulary(ids, limits, f"output.mask.{kind}.ids")


def check_num_ids(count: int, kind: str, vocab_size: int) -> None:
    """Checks that a mask's list of ids is not longer than the vocabulary."""
    if count > vocab_size:
        raise _bad(f"has {count} ids, but the vocabulary has {vocab_size} tokens", f"output.mask.{kind}")


def _choices_in_bits(packed: bytes, forbidden: set[int], limits: RequestLimits) -> bool:
    """Whether any bit is set for a token that is not in `forbidden`."""
    bits = int.from_bytes(packed, "little") & ((1 << limits.vocab_size) - 1)
    return bits.bit_count() > sum(packed[token >> 3] >> (token & 7) & 1 for token in forbidden)


def _bad(text: str, field: str) -> InvalidArgument:
    return InvalidArgument("BAD_MASK", field, text)


def check_vocabulary(token_ids: Sequence[int], limits: RequestLimits, field: str) -> None:
    """Checks that all tokens are in the vocabulary. `token_ids` must not be empty."""
    if max(token_ids) >= limits.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocab_size)
        raise out_of_vocab(token_ids[index], limits, f"{field}[{index}]")


def out_of_vocab(token_id: int, limits: RequestLimits, field: str) -> InvalidArgument:
    """The error for a token that does not exist."""
    text = f"token {token_id} is not below the vocabulary size {limits.vocab_size}"
    return InvalidArgument("TOKEN_OUT_OF_VOCAB", field, text)
