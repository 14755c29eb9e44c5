"""Faults of KV pages, for tests that must notice them.

Each changes the pages of one sequence as a mistake in the code around a model could.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.kv.tensors import KvTensors


@dataclass(frozen=True)
class Victim:
    """A sequence whose `length` tokens are in the pages `own`.

    Attributes:
        others: The pages of another sequence, as many.
        free: A page that nothing uses.
    """

    kv: KvTensors
    own: Sequence[int]
    length: int
    others: Sequence[int]
    free: int
    dice: random.Random

    def slot(self, position: int) -> int:
        size = self.kv.page_size
        return self.own[position // size] * size + position % size


def foreign(victim: Victim) -> None:
    """A page of another sequence, from any place in it."""
    victim.kv.copy_pages([(victim.dice.choice(victim.others), victim.dice.choice(victim.own))])


def stale(victim: Victim) -> None:
    """What other tokens had left in the same place of the sequence."""
    place = victim.dice.randrange(len(victim.own))
    victim.kv.copy_pages([(victim.others[place], victim.own[place])])


def foreign_keys(victim: Victim) -> None:
    """Only the keys of other tokens, in the same place of the sequence."""
    _copy_part(victim, 0)


def foreign_values(victim: Victim) -> None:
    """Only the values of other tokens, in the same place of the sequence."""
    _copy_part(victim, 1)


def _copy_part(victim: Victim, part: int) -> None:
    place = victim.dice.randrange(len(victim.own))
    for layer in range(victim.kv.num_layers):
        data = victim.kv.layer(layer)[part].data
        data[victim.own[place]] = data[victim.others[place]]


def _zero(victim: Victim, page: int) -> None:
    for layer in range(victim.kv.num_layers):
        for part in victim.kv.layer(layer):
            part.data[page] = 0


def zeroed(victim: Victim) -> None:
    """A page that was never written."""
    _zero(victim, victim.dice.choice(victim.own))


def shifted(victim: Victim) -> None:
    """Each token of a page is one slot too late; the last one comes first."""
    size = victim.kv.page_size
    first = victim.dice.choice(victim.own) * size
    victim.kv.move_slots([(first + slot, first + (slot + 1) % size) for slot in range(size)])


def swapped(victim: Victim) -> None:
    """Two pages in each other's place; of a sequence with one page: its first and its last token."""
    if len(victim.own) == 1:
        first, last = victim.slot(0), victim.slot(victim.length - 1)
        victim.kv.move_slots([(first, last), (last, first)])
        return
    one, two = victim.dice.sample(victim.own, 2)
    for pair in ((one, victim.free), (two, one), (victim.free, two)):
        victim.kv.copy_pages([pair])


def without_tail(victim: Victim) -> None:
    """Some of the last tokens, up to a page of them, were not written."""
    size = victim.kv.page_size
    _zero(victim, victim.free)
    lost = victim.dice.randint(1, min(size, victim.length))
    pairs = enumerate(range(victim.length - lost, victim.length), start=victim.free * size)
    victim.kv.move_slots([(empty, victim.slot(position)) for empty, position in pairs])


PAGE_FAULTS: tuple[Callable[[Victim], None], ...] = (
    *(foreign, stale, foreign_keys, foreign_values),
    *(zeroed, shifted, swapped, without_tail),
)
