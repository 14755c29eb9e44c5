"""What rank 0 sends arrives as it was, with every part that a batch can have."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading

import numpy as np
import pytest
import torch

from tests.workers.packing import HandPacker, HandSequence, Item
from workers.models.inputs import ForwardInputs
from workers.runners.rank_plan import (
    ForwardPlan,
    PlanKind,
    Way,
    encode_forward,
    encode_numbers,
    encode_pairs,
    forward_of,
    pairs_of,
    receive,
)

LARGE_TOKENS = 100_000


def batch(*, trees: bool, lora: bool, experts: bool) -> ForwardInputs:
    packer, slot = HandPacker(16, range(20)), 3 if lora else -1
    first = Item(HandSequence(lora_slot=slot), [5, 6, 7], (0, 2), parents=(0, 0) if trees else ())
    inputs = packer.pack([first, Item(HandSequence(), [8] * 40, ()), Item(HandSequence(), [9])])
    if not experts:
        return inputs
    return dataclasses.replace(inputs, experts=torch.randint(-1, 8, (len(inputs.token_ids), 3, 2)))


def received(message: bytes) -> ForwardPlan:
    here, there = socket.socketpair()
    with here, there:
        # On a thread, since it may be more than a socket holds.
        sender = threading.Thread(target=here.sendall, args=(message,))
        sender.start()
        plan = forward_of(receive(there))
        sender.join()
    return plan


def assert_equal(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(("trees", "lora", "experts"), [*itertools.product([False, True], repeat=3)])
def test_a_batch(way: Way, trees: bool, lora: bool, experts: bool) -> None:
    inputs = batch(trees=trees, lora=lora, experts=experts)
    assert (inputs.attention.trees is not None, inputs.lora_slots is not None) == (trees, lora)
    places = np.array([2, -1, 0]) if way is Way.AFTER and experts else None
    found = received(encode_forward(ForwardPlan(inputs, way, places)))
    assert found.way is way and (found.places is None) == (places is None)
    assert places is None or (found.places is not None and found.places.tolist() == places.tolist())
    assert_equal(found.inputs, inputs)


def test_a_large_batch() -> None:
    packer = HandPacker(16, range(LARGE_TOKENS // 16 + 1))
    inputs = packer.pack([Item(HandSequence(), [1] * LARGE_TOKENS)])
    assert_equal(received(encode_forward(ForwardPlan(inputs, Way.STEP))).inputs, inputs)


def test_other_messages() -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(encode_pairs(PlanKind.COPY_PAGES, [(1, 2), (3, 4)]))
            here.sendall(encode_numbers(PlanKind.SET_LORA, 7, -1))
        copies, adapter = receive(there), receive(there)
        assert copies.kind is PlanKind.COPY_PAGES and pairs_of(copies) == [(1, 2), (3, 4)]
        assert adapter.kind is PlanKind.SET_LORA and adapter.numbers[:2] == [7, -1]
        with pytest.raises(EOFError):
            receive(there)
