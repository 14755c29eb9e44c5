"""Options that no gateway of this code sends: each is computed or refused, and the worker serves on.

A gateway of other code sends settings that this worker does not know. Ignored, they would change results
without a word; and whatever one caller sends, a worker and its stream are those of all callers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from quire.v1 import types_pb2

from tests.workers.gateway_end import LAST_ROW, Gateway, forward_command
from tests.workers.test_server import served
from workers import forward_options, wire
from workers.common import worker_pb2
from workers.forward_options import ModelSizes, UnknownFieldError

_PATIENCE_S = 30
TOKENS = [1, 2, 3]
# A field that no message has: number 200, a varint.
UNKNOWN = bytes([0xC0, 0x0C, 0x01])
INTEGERS = (0, 1, 2, 3, 5, 7, 63, 64, 255, 1 << 20)
REALS = (0.0, 1.0, -1.0, 0.5, 3e38, float("inf"), float("-inf"), float("nan"))


def full_options() -> worker_pb2.ForwardOptions:
    """Valid ones, with a message of each kind."""
    mask = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[1, 2, 3]))
    draft = types_pb2.DraftProbabilities(token_ids=[2], probabilities=[1.0])
    return worker_pb2.ForwardOptions(
        rows=3,
        output=types_pb2.OutputOptions(
            sampling=types_pb2.SamplingParams(temperature=0.5, seed=1, logit_bias={3: 1.0}),
            mask=mask,
            top_logprobs=2,
            logprob_token_ids=[1],
        ),
        verify_rows=[types_pb2.VerifyRow(draft=draft), types_pb2.VerifyRow(mask=mask), types_pb2.VerifyRow()],
    )


def messages_in(message: Message, path: str = "") -> Iterator[tuple[str, Message]]:
    """A message and those in it that are set, with their paths as a worker names them."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, part in enumerate(value if field.is_repeated else (value,)):
                place = f"[{index}]" if field.is_repeated else ""
                yield from messages_in(part, f"{path}{field.name}{place}.")


@pytest.mark.parametrize("index", range(len([*messages_in(full_options())])))
async def test_a_field_that_the_protos_do_not_have_is_refused_by_its_path(index: int) -> None:
    options = full_options()
    path, message = [*messages_in(options)][index]
    message.MergeFromString(UNKNOWN)
    with pytest.raises(UnknownFieldError) as refused:
        wire.to_command(command(1, options.SerializeToString()), ModelSizes(64))
    assert refused.value.field == f"{path}200"
    async with served(kv_pages=32) as (gateway, _):
        gateway.send(command(1, options.SerializeToString()))
        error = (await gateway.next("error")).error
        assert (error.reason, error.field) == (worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED, f"{path}200")
        await still_serves(gateway)


@pytest.mark.parametrize(
    ("message", "known", "field", "path"),
    [
        (
            types_pb2.SamplingParams(temperature=1, min_p=0.5),
            "_SAMPLING_FIELDS",
            "min_p",
            "output.sampling.min_p",
        ),
        (types_pb2.OutputOptions(logprob=True), "_OUTPUT_FIELDS", "logprob", "output.logprob"),
    ],
)
def test_a_field_of_the_protos_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, message: Any, known: str, field: str, path: str
) -> None:
    """It was added to the protos, and nothing computes it yet."""
    forward_options._cached_options.cache_clear()
    monkeypatch.setattr(forward_options, known, getattr(forward_options, known) - {field})
    is_output = isinstance(message, types_pb2.OutputOptions)
    output = message if is_output else types_pb2.OutputOptions(sampling=message)
    data = worker_pb2.ForwardOptions(rows=1, output=output).SerializeToString()
    with pytest.raises(UnknownFieldError) as refused:
        wire.to_command(command(1, data), ModelSizes(64))
    assert refused.value.field == path


def changed(rng: random.Random) -> bytes:
    """Options with some values, messages or bytes that are not as they should be."""
    options = full_options()
    for _, message in [*messages_in(options)]:
        for field in message.DESCRIPTOR.fields:
            if rng.random() < 0.03:
                change(rng, message, field)
    if rng.random() < 0.3:
        rng.choice([message for _, message in messages_in(options)]).MergeFromString(UNKNOWN)
    data = bytearray(options.SerializeToString())
    if rng.random() < 0.2 and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def change(rng: random.Random, message: Any, field: Any) -> None:
    """Clears a field, or sets it to a value of its type."""
    if field.message_type is not None or rng.random() < 0.3:
        message.ClearField(field.name)
        return
    values: Any = {
        FieldDescriptor.CPPTYPE_BOOL: (False, True),
        FieldDescriptor.CPPTYPE_FLOAT: REALS,
        FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 77),
        FieldDescriptor.CPPTYPE_STRING: (b"", b"\x00", b"\xff" * 9),
    }.get(field.cpp_type, INTEGERS)
    if field.is_repeated:
        getattr(message, field.name)[:] = [rng.choice(values) for _ in range(rng.randrange(5))]
    else:
        setattr(message, field.name, rng.choice(values))


def command(op_id: int, options: bytes, kind: str = "PREFILL") -> worker_pb2.WorkerCommand:
    return forward_command(op_id, op_id, TOKENS, kind, options=options, ephemeral=True)


async def still_serves(gateway: Gateway) -> None:
    gateway.send(command(1 << 40, LAST_ROW))
    assert (await gateway.next("forward")).op_id == 1 << 40


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_options_each_command_is_answered_and_the_worker_serves_on(seed: int) -> None:
    rng, computed = random.Random(seed), 0
    async with served(kv_pages=64) as (gateway, _):
        for first in range(1, 241, 8):
            sent = {op_id: changed(rng) for op_id in range(first, first + 8)}
            kinds = [rng.choice(("PREFILL", "VERIFY", "SCORE", "DECODE")) for _ in sent]
            commands = [command(op_id, sent[op_id], kind) for op_id, kind in zip(sent, kinds, strict=True)]
            # Another caller's command in the same message.
            commands.append(command(other := first + 1000, LAST_ROW))
            gateway.send(*commands)
            missing = {*sent, other}
            while missing:
                event = await asyncio.wait_for(gateway.events.get(), _PATIENCE_S)
                is_computed = event.WhichOneof("event") == "forward"
                assert is_computed or event.op_id != other
                assert not (is_computed and has_unknown(sent.get(event.op_id, b""))), "a setting was ignored"
                computed += is_computed and event.op_id in missing
                missing.discard(event.op_id)
        await still_serves(gateway)
    assert 30 + 20 < computed < 240, "some are computed, and some are not"


def has_unknown(data: bytes) -> bool:
    try:
        options = worker_pb2.ForwardOptions.FromString(data)
    except DecodeError:
        return False
    size = options.ByteSize()
    options.DiscardUnknownFields()
    return options.ByteSize() != size
