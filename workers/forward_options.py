"""Decodes the options of a forward: the output of its rows, and how it is computed.

The gateway passes options on as bytes. Many forwards have equal options, which are decoded once.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any, NamedTuple

import numpy as np
from quire.v1 import types_pb2

from workers.common import worker_pb2
from workers.common.unknown_fields import unknown_field
from workers.given_experts import ONE_BYTE_EXPERTS, GivenExperts
from workers.operations import Accept, Forward, Kind
from workers.outputs import (
    GREEDY,
    DataType,
    DraftProbabilities,
    HiddenSpec,
    OutputSpec,
    Sampling,
    TokenMask,
    VerifyRow,
)

# More tokens than any vocabulary has.
_MAX_VOCABULARY = 1 << 22
# Limits of the cache of decoded options: their number, and the encoded size of each.
_CACHED_OPTIONS = 4096
_MAX_CACHED_BYTES = 256

_OUTPUT_FIELDS = {field.name for field in dataclasses.fields(OutputSpec)}
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(Sampling)}
DTYPES = {dtype: types_pb2.DataType.Value(f"DATA_TYPE_{dtype.name}") for dtype in DataType}
_KNOWN_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


class ModelSizes(NamedTuple):
    """The sizes of a model, against which commands are checked.

    Attributes:
        moe_layers: The number of layers with experts.
        num_experts: The number of experts in each of them.
        experts_per_token: The number of experts that compute a token.
    """

    vocab_size: int = _MAX_VOCABULARY
    num_layers: int = 0
    moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


UNKNOWN_SIZES = ModelSizes()


class UnknownFieldError(ValueError):
    """Options of a forward have a field that this code does not know: the gateway's code is newer.

    Attributes:
        field: The path of the field, which ends with its number, or with its name if the protos have it.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"unknown field {field}")
        self.field = field


def options_of(data: bytes, seed: int, keep_all: bool, sizes: ModelSizes) -> dict[str, Any]:
    """The fields of a Forward that its options set. Forwards with equal options may share them.

    seed: The seed of the cache, for draws without one.
    keep_all: All tokens of the forward are kept, whatever the options say.

    Raises ValueError, such as UnknownFieldError, for options that this model cannot have.
    """
    found = _cached_options(data, keep_all, sizes) if len(data) <= _MAX_CACHED_BYTES else None
    options, draws = found or _to_options(_parsed(data), keep_all, sizes)
    return options | {"output": _seeded(options["output"], seed)} if draws else options


@functools.lru_cache(_CACHED_OPTIONS)
def plain_output(data: bytes, sizes: ModelSizes) -> tuple[OutputSpec | None, bool]:
    """The output of a plain decode with these options, and whether it draws with the seed of the cache.

    None: they need more, or are wrong, which the command of each row that has them then says.
    """
    try:
        found = _cached_options(data, False, sizes)
        if found is None:
            return None, False
        options, draws = found
        forward = Forward(0, 0, 1, (0,), kind=Kind.DECODE, **options)
    except Exception:  # whatever is wrong with these, other rows of the message are right
        return None, False
    return (forward.output, draws) if forward.is_plain else (None, False)


@functools.lru_cache(_CACHED_OPTIONS)
def plain_draw(data: bytes, seed: int, sizes: ModelSizes) -> OutputSpec | None:
    """As `plain_output`, with the seed of a cache. Parsed options are remembered for all caches."""
    output, _ = plain_output(data, sizes)
    return None if output is None else _seeded(output, seed)


def _seeded(output: OutputSpec, seed: int) -> OutputSpec:
    assert output.sampling is not None, "it draws"
    return dataclasses.replace(output, sampling=dataclasses.replace(output.sampling, seed=seed))


@functools.lru_cache(_CACHED_OPTIONS)
def _cached_options(data: bytes, keep_all: bool, sizes: ModelSizes) -> tuple[dict[str, Any], bool] | None:
    """None for options with masks. They are not cached: decoded they may be far larger than encoded."""
    options = _parsed(data)
    if options.output.HasField("mask") or options.verify_rows:
        return None
    return _to_options(options, keep_all, sizes)


def _to_options(
    options: worker_pb2.ForwardOptions, keep_all: bool, sizes: ModelSizes
) -> tuple[dict[str, Any], bool]:
    """The fields of a Forward that its options set, and whether it draws with the seed of its cache.

    Forwards with equal options may share the fields. Raises UnknownFieldError for one of the protos alone.
    """
    output = options.output
    draws = output.HasField("sampling") and not output.sampling.HasField("seed")
    ends = frozenset(options.end_token_ids)
    fields = {
        "rows": options.rows,
        "scored": options.scored,
        "output": _to_output(output, sizes, ends),
        "accept": Accept.CHOSEN if options.accept and not keep_all else Accept.ALL,
        "choices": [_to_choice(row, sizes.vocab_size) for row in options.verify_rows],
        "sample_seeds": tuple(options.sample_seeds),
        "parents": tuple(options.parents),
        "draft_tokens": options.draft_tokens,
        "experts": _to_experts(options, sizes) if options.experts else None,
    }
    return fields, draws


def _parsed(data: bytes) -> worker_pb2.ForwardOptions:
    """Raises UnknownFieldError if there is a field that the protos do not have: it would be ignored."""
    options = worker_pb2.ForwardOptions.FromString(data)
    if field := unknown_field(options):
        raise UnknownFieldError(field)
    return options


def _to_experts(options: worker_pb2.ForwardOptions, sizes: ModelSizes) -> GivenExperts:
    """The gateway has checked them. Raises ValueError if they do not fit the model."""
    ids = np.frombuffer(options.experts, dtype="u1" if sizes.num_experts <= ONE_BYTE_EXPERTS else "<u2")
    if ids.max(initial=0) >= sizes.num_experts:
        raise ValueError(f"expert {ids.max()} of {sizes.num_experts}")
    return GivenExperts(options.experts_from, ids.reshape(-1, sizes.moe_layers, sizes.experts_per_token))


def _to_output(
    message: types_pb2.OutputOptions, sizes: ModelSizes, end_token_ids: frozenset[int]
) -> OutputSpec:
    for field, _ in message.ListFields():
        if field.name not in _OUTPUT_FIELDS:
            raise UnknownFieldError(f"output.{field.name}")
    output = OutputSpec(
        logits=_KNOWN_DTYPES[message.logits] if message.logits else None,
        top_logprobs=message.top_logprobs,
        logprob_token_ids=tuple(message.logprob_token_ids),
        logprob=message.logprob,
        sampled_logprob=message.sampled_logprob,
        experts=message.experts,
        entropy=message.entropy,
        sampling=_to_sampling(message.sampling) if message.HasField("sampling") else None,
        mask=_to_mask(message.mask, sizes.vocab_size) if message.HasField("mask") else None,
        hidden=_to_hidden(message.hidden, sizes.num_layers) if message.HasField("hidden") else None,
        end_token_ids=end_token_ids,
    )
    return GREEDY if output == GREEDY else output


def _to_hidden(message: types_pb2.HiddenStates, num_layers: int) -> HiddenSpec:
    """No layers mean the last one. Raises ValueError for a layer that the model does not have."""
    layers = tuple(message.layers) or (num_layers,)
    if max(layers) > num_layers:
        raise ValueError(f"hidden states of layers {layers} of {num_layers}")
    number_format = _KNOWN_DTYPES[message.dtype] if message.dtype else DataType.F32
    return HiddenSpec(layers, number_format, message.mean)


def _to_sampling(message: types_pb2.SamplingParams) -> Sampling:
    """Unset fields keep the defaults of `Sampling`, which have no effect."""
    given = {field.name: value for field, value in message.ListFields()}
    if not given.keys() <= _SAMPLING_FIELDS:
        raise UnknownFieldError(f"output.sampling.{next(iter(given.keys() - _SAMPLING_FIELDS))}")
    return Sampling(**given | {"logit_bias": dict(message.logit_bias)})


def _to_choice(message: types_pb2.VerifyRow, vocab_size: int) -> VerifyRow:
    return VerifyRow(
        mask=_to_mask(message.mask, vocab_size) if message.HasField("mask") else None,
        draft=_to_draft(message.draft) if message.HasField("draft") else None,
    )


def _to_draft(message: types_pb2.DraftProbabilities) -> DraftProbabilities:
    """The gateway has checked them. They are scaled so that their sum is 1 despite rounding."""
    if message.dense:
        ids, probabilities = None, np.frombuffer(message.dense, dtype="<f4").astype(np.float64)
    else:
        ids = np.fromiter(message.token_ids, dtype=np.int64, count=len(message.token_ids))
        probabilities = np.fromiter(message.probabilities, dtype=np.float64, count=len(ids))
        order = np.argsort(ids)
        ids, probabilities = ids[order], probabilities[order]
    return DraftProbabilities(ids, probabilities / probabilities.sum())


def _to_mask(message: types_pb2.TokenMask, vocab_size: int) -> TokenMask:
    """Converts any encoding of a mask to bits once, since every row of every step reads it.

    The gateway has checked it. Raises ValueError for more tokens than the vocabulary has.
    """
    kind, max_bytes = message.WhichOneof("kind"), (vocab_size + 31) // 32 * 4
    if kind in ("packed", "deflated"):
        packed = _inflated(message.deflated, max_bytes + 1) if kind == "deflated" else message.packed
        if len(packed) > max_bytes:
            raise ValueError(f"a mask of {len(packed)} bytes for {vocab_size} tokens")
        return TokenMask(packed=packed)
    ids = message.forbidden.ids if kind == "forbidden" else message.allowed.ids
    if len(ids) > vocab_size:
        raise ValueError(f"a mask of {len(ids)} tokens of {vocab_size}")
    listed = np.fromiter(ids, dtype=np.int64, count=len(ids))
    listed = listed[listed < vocab_size]
    if kind == "forbidden":
        allowed = np.ones(vocab_size, dtype=np.bool_)
        allowed[listed] = False
    else:
        allowed = np.zeros(listed.max(initial=0) + 1, dtype=np.bool_)  # missing bits mean forbidden
        allowed[listed] = True
    return TokenMask(packed=np.packbits(allowed, bitorder="little").tobytes())


def _inflated(deflated: bytes, max_bytes: int) -> bytes:
    """The first `max_bytes` of a zlib stream. Raises ValueError if it is not one."""
    try:
        return zlib.decompressobj().decompress(deflated, max_bytes)
    except zlib.error as error:
        raise ValueError(f"a mask that is no zlib stream: {error}") from None
