"""The messages of rank 0 to the other ranks, as bytes: JSON that describes what follows, and integer tensors.

Dimension letters: N items; B tokens that are computed again; W states that are written.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workers.kv.states import Held, StateRun
from workers.models.inputs import AttentionBatch, ForwardInputs, TokenTrees, tensors_of

# The bytes of the JSON, and of the tensors.
_LENGTHS = struct.Struct("<2q")


class PlanKind(enum.IntEnum):
    """What the ranks do next, with its numeric arguments."""

    FORWARD = 0  # the way
    COPY_PAGES = 1
    MOVE_SLOTS = 2
    SET_LORA = 3  # the slot, and the key of the adapter that the rank has read; -1: the slot is emptied
    USE_WEIGHTS = 4  # those that the rank has read under a number
    DROP_WEIGHTS = 5  # all that the rank has read or is reading, up to a number


class Way(enum.IntEnum):
    """How a forward is run: see `Runner.step` and `Runner.launch`."""

    STEP = 0  # the tokens of all earlier ones were read on rank 0
    EAGER = 1  # a step without a CUDA graph
    LAUNCH = 2  # the tokens of all earlier ones were read on rank 0
    AFTER = 3  # launched behind the one that was launched last


class ForwardPlan(NamedTuple):
    """A forward of all ranks.

    Attributes:
        inputs: On the host; of a step launched behind another one without the tokens that the device has.
        way: How it is run.
        places: As in `After`.
    """

    inputs: ForwardInputs
    way: Way
    places: NDArray[np.int64] | None = None


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        kind: What to do.
        numbers: Those of the kind.
        tensors: By name, over memory that nobody else has.
    """

    kind: PlanKind
    numbers: Sequence[int]
    tensors: Mapping[str, torch.Tensor]


def encode(kind: PlanKind, *numbers: int, **tensors: torch.Tensor) -> bytes:
    """The bytes of a message."""
    # The widest first, so that each is at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    places = [(name, str(one.dtype).removeprefix("torch."), one.shape) for name, one in ordered]
    body = b"".join([one.numpy().tobytes() for _, one in ordered])
    head = json.dumps([kind, numbers, places]).encode()
    return _LENGTHS.pack(len(head), len(body)) + head + body


def receive(connection: socket.socket) -> Message:
    """Wait for the next message. Raises EOFError if the sender has ended."""
    head_bytes, body_bytes = _LENGTHS.unpack(_received(connection, _LENGTHS.size))
    kind, numbers, places = json.loads(_received(connection, head_bytes))
    body = torch.from_numpy(np.frombuffer(_received(connection, body_bytes), np.uint8))
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for name, dtype_name, shape in places:
        dtype: torch.dtype = getattr(torch, dtype_name)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        tensors[name] = body[begin:end].view(dtype).view(shape)
    return Message(PlanKind(kind), numbers, tensors)


def _received(connection: socket.socket, count: int) -> bytearray:
    memory = bytearray(count)
    left = memoryview(memory)
    while left:
        received = connection.recv_into(left)
        if not received:
            raise EOFError
        left = left[received:]
    return memory


def encode_pairs(kind: PlanKind, pairs: Sequence[tuple[int, int]]) -> bytes:
    """Pairs of pages or slots."""
    return encode(kind, pairs=torch.tensor(pairs, dtype=torch.int64))


def pairs_of(message: Message) -> list[tuple[int, int]]:
    """The pairs of a message."""
    return [(source, target) for source, target in message.tensors["pairs"].tolist()]


def encode_forward(plan: ForwardPlan) -> bytes:
    """A forward, and how it is run."""
    inputs, trees = plan.inputs, plan.inputs.attention.trees
    tensors = tensors_of(inputs) | tensors_of(inputs.attention)
    if plan.places is not None:
        tensors["places"] = torch.from_numpy(plan.places)  # [N]
    if inputs.states:
        tensors |= _tensors_of_states(inputs.states)
    if trees is not None:
        tensors |= tensors_of(trees) | {"is_tree": torch.tensor(trees.is_tree)}
    return encode(PlanKind.FORWARD, plan.way, **tensors)


def forward_of(message: Message) -> ForwardPlan:
    """The forward of a message, which has its tensors."""
    found, trees = message.tensors, None
    if "is_tree" in found:
        trees = TokenTrees(**_fields_of(TokenTrees, found) | {"is_tree": found["is_tree"].tolist()})
    attention = AttentionBatch(
        **_fields_of(AttentionBatch, found),
        query_lens=found["query_starts"].diff().tolist(),
        context_lens_host=found["context_lens"].tolist(),
        trees=trees,
    )
    states = _states_of(found) if "state_runs" in found else ()
    inputs = ForwardInputs(**_fields_of(ForwardInputs, found), attention=attention, states=states)
    places = found["places"].numpy() if "places" in found else None
    return ForwardPlan(inputs, Way(message.numbers[0]), places)


def _fields_of(record: type, found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fields of a record that are tensors of a message."""
    return {field.name: found[field.name] for field in dataclasses.fields(record) if field.name in found}


def _tensors_of_states(runs: Sequence[StateRun]) -> dict[str, torch.Tensor]:
    """The tensors of N items' states. Slots have the same numbers on all ranks."""
    sizes = [(run.source.position, run.source.slot, len(run.before), len(run.writes)) for run in runs]
    before = [token for run in runs for token in run.before]
    writes = [(held.position, held.slot) for run in runs for held in run.writes]
    return {
        "state_runs": torch.tensor(sizes, dtype=torch.int64),  # [N, 4]
        "state_tokens": torch.tensor(before, dtype=torch.int64),  # [B]
        "state_writes": torch.tensor(writes, dtype=torch.int64).view(-1, 2),  # [W, 2]
    }


def _states_of(found: Mapping[str, torch.Tensor]) -> list[StateRun]:
    """The states of a message."""
    tokens, writes = iter(found["state_tokens"].tolist()), iter(found["state_writes"].tolist())
    return [
        StateRun(
            Held(position, slot),
            [*islice(tokens, num_before)],
            [Held(*held) for held in islice(writes, num_writes)],
        )
        for position, slot, num_before, num_writes in found["state_runs"].tolist()
    ]
