"""Mistakes in the KV of workers, planted in their processes: a positive control of tests that compare tokens.

    PLANTED_KV=forwards PYTHONPATH=tests/planted_kv/hook python -m pytest -n 0 tests/e2e/test_adoption.py

plants one in each worker that the tests start, by `hook/sitecustomize.py`. Tests that still pass do not
depend on the KV that it changes. The product itself does not know of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from workers import adoption, other_commands
from workers.executors.engine import Engine
from workers.kv.disk_pages import ReadOutcome
from workers.kv.page_files import PageFiles
from workers.kv.tensors import KvTensors
from workers.models.inputs import ForwardInputs
from workers.operations import Adopt, Adopted
from workers.runners.eager import EagerRunner

# Has the module that Python imports at its start.
HOOK = Path(__file__).parent / "hook"
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


def adoptions(replace: Replace) -> None:
    """In the first page of a sequence that a worker keeps for the next gateway, likewise."""
    right = adoption.keep_confirmed

    def keep_confirmed(engine: Engine, command: Adopt) -> Adopted:
        adopted = right(engine, command)
        shift(engine.kv, {sequence.pages[0] for sequence in engine.kv_table if len(sequence.pages)})
        return adopted

    replace(other_commands, "keep_confirmed", keep_confirmed)


def files(replace: Replace) -> None:
    """Files of pages are read whatever is in them."""
    right = PageFiles.read

    def read(self: PageFiles, *args: Any) -> ReadOutcome:
        outcome = right(self, *args)
        return ReadOutcome.READ if outcome is ReadOutcome.REFUSED else outcome

    replace(PageFiles, "read", read)


PLANTS: dict[str, Callable[[Replace], None]] = {
    plant.__name__: plant for plant in (forwards, copies, adoptions, files)
}


def shift(kv: KvTensors, pages: Iterable[int]) -> None:
    """Each token of these pages is one slot too late; the last one is lost, and the first one there twice."""
    for first in (page * kv.page_size for page in pages):
        kv.move_slots([(slot, slot + 1) for slot in range(first, first + kv.page_size - 1)])
