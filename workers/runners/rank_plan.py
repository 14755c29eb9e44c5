"""What rank 0 tells the other ranks, as bytes: a header of numbers, an array of int64, one of int32.

Dimension letters: T tokens; N items; R wanted rows; P pages of the longest table; L layers with experts;
E experts of a token.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workers.models.inputs import MAX_TREE_TOKENS, AttentionBatch, ForwardInputs, TokenTrees

_NUMBERS = 7
# The kind, the number of int64, the number of int32, and numbers that the kind defines.
_HEADER = struct.Struct(f"<{3 + _NUMBERS}q")


class PlanKind(enum.IntEnum):
    """What the ranks do next."""

    FORWARD = 0  # flags and the way, T, N, R, P, L, E
    COPY_PAGES = 1
    MOVE_SLOTS = 2
    SET_LORA = 3  # the slot, and the key of the adapter that the rank has read; -1: the slot is emptied
    USE_WEIGHTS = 4  # those that the rank has read
    DROP_WEIGHTS = 5  # all that the rank has read or is reading, up to a number


class Way(enum.IntEnum):
    """How a forward is run: see `Runner.step` and `Runner.launch`."""

    STEP = 0  # the tokens of all earlier ones were read on rank 0
    EAGER = 1  # a step without a CUDA graph
    LAUNCH = 2  # the tokens of all earlier ones were read on rank 0
    AFTER = 3  # launched behind the one that was launched last


_HAS_LORA, _HAS_TREES, _HAS_EXPERTS, _HAS_PLACES = 1, 2, 4, 8
_FLAG_BITS = 4


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


def encode(kind: PlanKind, numbers: Sequence[int], wide: torch.Tensor, narrow: torch.Tensor) -> bytes:
    """The bytes of a message: up to seven numbers, [n] int64 and [m] int32."""
    header = _HEADER.pack(kind, len(wide), len(narrow), *numbers, *[0] * (_NUMBERS - len(numbers)))
    return header + wide.numpy().tobytes() + narrow.numpy().tobytes()


class Message:
    """A message that was received.

    Attributes:
        kind: What to do.
        numbers: Those of the header.
        wide: [n] int64, owned by this object.
        narrow: [m] int32, likewise.
    """

    def __init__(self, header: bytes, connection: socket.socket) -> None:
        """Read what follows a header. Raises EOFError if the sender ends."""
        kind, wides, narrows, *self.numbers = _HEADER.unpack(header)
        self.kind = PlanKind(kind)
        memory = bytearray(8 * wides + 4 * narrows)
        _receive(connection, memoryview(memory))
        body = torch.frombuffer(memory, dtype=torch.int32) if memory else torch.empty(0, dtype=torch.int32)
        self.wide = body[: 2 * wides].view(torch.int64)
        self.narrow = body[2 * wides :]


def receive(connection: socket.socket) -> Message:
    """Wait for the next message. Raises EOFError if the sender has ended."""
    header = bytearray(_HEADER.size)
    _receive(connection, memoryview(header))
    return Message(bytes(header), connection)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]


def encode_pairs(kind: PlanKind, pairs: Sequence[tuple[int, int]]) -> bytes:
    """Pairs of pages or slots."""
    return encode(
        kind, [], torch.tensor(pairs, dtype=torch.int64).flatten(), torch.empty(0, dtype=torch.int32)
    )


def encode_numbers(kind: PlanKind, *numbers: int) -> bytes:
    """A message of numbers only."""
    return encode(kind, numbers, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


def pairs_of(message: Message) -> list[tuple[int, int]]:
    """The pairs of a message."""
    return [(source, target) for source, target in message.wide.view(-1, 2).tolist()]


def encode_forward(plan: ForwardPlan) -> bytes:
    """A forward, and how it is run."""
    inputs = plan.inputs
    attention, trees = inputs.attention, inputs.attention.trees
    flags = plan.way << _FLAG_BITS
    experts: tuple[int, ...] = (0, 0)
    wide = [inputs.token_ids, inputs.positions, inputs.slots, inputs.wanted_rows]
    narrow = [attention.page_tables.flatten(), attention.query_starts, attention.context_lens]
    if inputs.lora_slots is not None:
        flags |= _HAS_LORA
        narrow.append(inputs.lora_slots)
    if trees is not None:
        flags |= _HAS_TREES
        wide.append(trees.ancestors)
        narrow += [trees.roots, trees.depths.flatten(), torch.tensor(trees.is_tree, dtype=torch.int32)]
    if inputs.experts is not None:
        flags |= _HAS_EXPERTS
        wide.append(inputs.experts.flatten())
        experts = tuple(inputs.experts.shape[1:])
    if plan.places is not None:
        flags |= _HAS_PLACES
        wide.append(torch.from_numpy(plan.places))
    items, pages = attention.page_tables.shape
    numbers = (flags, len(inputs.token_ids), items, len(inputs.wanted_rows), pages, *experts)
    return encode(PlanKind.FORWARD, numbers, torch.cat(wide), torch.cat(narrow))


def forward_of(message: Message) -> ForwardPlan:
    """The forward of a message, of which its tensors are views."""
    flags, tokens, items, wanted, pages, layers, per_token = message.numbers
    has_trees = bool(flags & _HAS_TREES)
    has_places = bool(flags & _HAS_PLACES)
    token_ids, positions, slots, rows, ancestors, given, places = torch.split(
        message.wide,
        [
            *(tokens, tokens, tokens, wanted, tokens * has_trees, tokens * layers * per_token),
            items * has_places,
        ],
    )
    lora = tokens if flags & _HAS_LORA else 0
    of_trees = [items, items * MAX_TREE_TOKENS, items] if has_trees else [0, 0, 0]
    tables, starts, contexts, lora_slots, roots, depths, is_tree = torch.split(
        message.narrow, [items * pages, items + 1, items, lora, *of_trees]
    )
    trees = None
    if has_trees:
        flags_of_trees = [bool(flag) for flag in is_tree.tolist()]
        trees = TokenTrees(roots, ancestors, depths.view(items, MAX_TREE_TOKENS), flags_of_trees)
    inputs = ForwardInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        wanted_rows=rows,
        attention=AttentionBatch(
            page_tables=tables.view(items, pages),
            query_starts=starts,
            context_lens=contexts,
            query_lens=starts.diff().tolist(),
            context_lens_host=contexts.tolist(),
            trees=trees,
        ),
        lora_slots=lora_slots if lora else None,
        experts=given.view(tokens, layers, per_token) if flags & _HAS_EXPERTS else None,
    )
    return ForwardPlan(inputs, Way(flags >> _FLAG_BITS), places.numpy() if has_places else None)
