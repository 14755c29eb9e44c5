"""Mistakes in the KV of a worker, which `test_conformance.py` has to notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.runners.eager import EagerRunner

# Forwards of so many tokens are those of prompts, replays and long verifies.
_MANY_TOKENS = 4


# As setattr; pytest's undoes it at the end of a test.
Replace = Callable[[Any, str, Any], None]


def forwards(replace: Replace) -> None:
    """A forward of four or more tokens of a sequence stores the KV of other tokens."""
    right = EagerRunner.step

    def step(self: EagerRunner, inputs: ForwardInputs, *args: Any) -> Any:
        result = right(self, inputs, *args)
        lengths = torch.tensor(inputs.attention.query_lens)
        many = (lengths >= _MANY_TOKENS).repeat_interleave(lengths)
        if many.any():
            tokens = inputs.token_ids
            others = torch.where(many, torch.where(tokens > 0, tokens - 1, 1), tokens)
            wrong = dataclasses.replace(inputs, token_ids=others)
            self._model.forward(wrong.to(self._kv.device), self._kv)
        return result

    replace(EagerRunner, "step", step)


def copies(replace: Replace) -> None:
    """In a page that is copied each token is one slot too late."""
    right = KvTensors.copy_pages

    def copy_pages(self: KvTensors, pairs: Sequence[tuple[int, int]]) -> None:
        right(self, pairs)
        shift(self, [target for _, target in pairs])

    replace(KvTensors, "copy_pages", copy_pages)


PLANTS: dict[str, Callable[[Replace], None]] = {plant.__name__: plant for plant in (forwards, copies)}


def shift(kv: KvTensors, pages: Iterable[int]) -> None:
    """Each token of these pages is one slot too late; the last one is lost, and the first one there twice."""
    for first in (page * kv.page_size for page in pages):
        kv.move_slots([(slot, slot + 1) for slot in range(first, first + kv.page_size - 1)])
