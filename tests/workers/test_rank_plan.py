"""A message of rank 0 that is larger than a socket holds arrives whole. What it is: `test_rank_processes`."""

from __future__ import annotations

import socket
import threading

import torch

from tests.workers.packing import HandPacker, HandSequence, Item
from workers.runners.rank_plan import ForwardPlan, Way, encode_forward, forward_of, receive

LARGE_TOKENS = 100_000


def test_a_large_batch() -> None:
    packer = HandPacker(16, range(LARGE_TOKENS // 16 + 1))
    sent = packer.pack([Item(HandSequence(), [token % 97 for token in range(LARGE_TOKENS)])])
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=here.sendall, args=(encode_forward(ForwardPlan(sent, Way.STEP)),))
        sender.start()
        found = forward_of(receive(there)).inputs
        sender.join()
    for name in ("token_ids", "positions", "slots", "wanted_rows"):
        assert torch.equal(getattr(found, name), getattr(sent, name)), name
    assert torch.equal(found.attention.page_tables, sent.attention.page_tables)
