"""Masks of tokens as callers send them: checked once, and passed on as they came.

A mask that was sent deflated, or as a list, is bits in a worker, and may be many times as large there. Here
it is inflated for as long as it is looked at; what the bits will take is counted with the call, see
`bytes_in_worker`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quire.v1 import types_pb2

from service.api.vocabulary import check_vocabulary
from service.errors import InvalidArgument

if TYPE_CHECKING:
    from service.api.validation import RequestLimits

# What a stream may have beyond the bits of a mask that does not compress: several times what zlib adds.
_STREAM_BYTES = 1 << 10


def check_choice(
    mask: types_pb2.TokenMask | None, sampling: types_pb2.SamplingParams, limits: RequestLimits
) -> None:
    """A mask is one, of this vocabulary; after it and the biases that forbid, a token can still be chosen.

    None: there is no mask. Raises InvalidArgument.
    """
    biases = sampling.logit_bias.items()
    # Whether all of them are tokens is looked at elsewhere, be it later.
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
            # Some may be there twice; seldom is it worth to look.
            left = most < limits.vocab_size or len(forbidden.union(mask.forbidden.ids)) < limits.vocab_size
        case _:
            raise _bad("one of packed, allowed, deflated and forbidden is needed", "output.mask")
    if not left:
        raise _bad("every token is forbidden", "output.mask")


def bytes_in_worker(masks: Iterable[types_pb2.TokenMask], limits: RequestLimits) -> int:
    """How many bytes these masks, which were checked, have in a worker beyond those that were sent."""
    return sum(_word_bytes(limits) for mask in masks if mask.WhichOneof("kind") not in ("packed", None))


def _word_bytes(limits: RequestLimits) -> int:
    """Of a mask that fills words of 32 bits, to which grammars are compiled."""
    return (limits.vocab_size + 31) // 32 * 4


def _sized(packed: bytes, kind: str, limits: RequestLimits) -> bytes:
    needed = (limits.vocab_size + 7) // 8
    if len(packed) not in (needed, _word_bytes(limits)):
        text = f"there are {len(packed)} bytes, {needed} hold one bit for each token"
        raise _bad(text, f"output.mask.{kind}")
    return packed


def _inflated(deflated: bytes, limits: RequestLimits) -> bytes:
    """The bits of a deflated mask. Never makes more of them than a mask has."""
    field, most = "output.mask.deflated", _word_bytes(limits)
    if len(deflated) > most + _STREAM_BYTES:
        raise _bad(f"{len(deflated)} bytes were sent, {most} are enough for a packed mask", field)
    stream = zlib.decompressobj()
    try:
        # One more, so that the end of the stream is seen.
        packed = stream.decompress(deflated, most + 1)
    except zlib.error:
        raise _bad("it is not a zlib stream", field) from None
    if len(packed) > most:
        raise _bad(f"it inflates to more than {most} bytes, which a mask has at most", field)
    if not stream.eof:
        raise _bad("the zlib stream ends early", field)
    if stream.unused_data:
        raise _bad("there are bytes behind the zlib stream", field)
    return _sized(packed, "deflated", limits)


def _check_ids(ids: Sequence[int], kind: str, limits: RequestLimits) -> None:
    """A list has ids, no more of them than there are tokens, and all of them are tokens."""
    if len(ids) > limits.vocab_size:
        text = f"{len(ids)} ids were sent, there are {limits.vocab_size} tokens"
        raise _bad(text, f"output.mask.{kind}")
    check_vocabulary(ids, limits, f"output.mask.{kind}.ids")


def _choices_in_bits(packed: bytes, forbidden: set[int], limits: RequestLimits) -> bool:
    """Whether more bits are set than those of forbidden tokens."""
    bits = int.from_bytes(packed, "little") & ((1 << limits.vocab_size) - 1)
    return bits.bit_count() > sum(packed[token >> 3] >> (token & 7) & 1 for token in forbidden)


def _bad(text: str, field: str) -> InvalidArgument:
    return InvalidArgument("BAD_MASK", field, text)
