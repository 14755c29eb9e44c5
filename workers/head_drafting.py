"""Drafts tokens with a model's own head for multi-token prediction (`models/mtp_head.py`); see `drafting`.

The head continues from the hidden state whose token was just chosen. Its keys and values of earlier tokens
are in the model's pages. Those of drafts are written to slots after them, which are freed when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from workers.drafting import choice_of
from workers.executors.engine import Engine
from workers.kv.page_pool import OutOfPages
from workers.kv.sequence import KvSequence
from workers.kv.table import KvTable
from workers.operations import Forward


class HeadDrafting:
    """`Drafts` on the sequences of the model. Only the thread of the step loop uses it."""

    def __init__(self, engine: Engine, max_seq_tokens: int) -> None:
        """`engine`: of the model. `max_seq_tokens`: the longest sequence of it."""
        self._engine = engine
        self._max_seq_tokens = max_seq_tokens

    @property
    def tables(self) -> Sequence[KvTable]:
        return ()

    def draft(self, forwards: Sequence[Forward], table: KvTable, until_ns: int | None = None) -> None:
        begun: list[tuple[Forward, KvSequence]] = []
        try:
            for forward in forwards:
                sequence = table.get(forward.sequence)
                if sequence is not None and self._reserve(sequence, forward.draft_tokens):
                    begun.append((forward, sequence))
            if begun:
                self._follow(begun, until_ns)
        finally:
            for forward, sequence in begun:
                forward.hidden_rows = ()
                table.truncate(sequence, len(sequence))

    def _reserve(self, sequence: KvSequence, count: int) -> bool:
        """Reserves slots for the chosen token and a draft after it. False: there are none."""
        try:
            self._engine.reserve(sequence, min(count, self._max_seq_tokens - len(sequence)))
        except OutOfPages:
            return False
        return len(sequence) < self._max_seq_tokens

    def _follow(self, drafting: Sequence[tuple[Forward, KvSequence]], until_ns: int | None) -> None:
        """Drafts one token after another, for all sequences in the same steps."""
        rows = [forward.kept - len(forward.token_ids) - 1 for forward, _ in drafting]
        tokens = [[forward.outputs[row].token_id] for (forward, _), row in zip(drafting, rows, strict=True)]
        hidden = torch.stack([one.hidden_rows[row] for (one, _), row in zip(drafting, rows, strict=True)])
        left = list(range(len(drafting)))
        while left:
            own = [_after(*drafting[index], tokens[index]) for index in left]
            chosen, hidden = self._engine.draft(own, hidden)
            for index, token in zip(left, chosen, strict=True):
                tokens[index].append(token)
                drafting[index][0].drafts = tokens[index][1:]
            if until_ns is not None and time.monotonic_ns() >= until_ns:
                return
            goes_on = [place for place, index in enumerate(left) if self._goes_on(*drafting[index])]
            left = [left[place] for place in goes_on]
            hidden = hidden[goes_on]

    def _goes_on(self, forward: Forward, sequence: KvSequence) -> bool:
        drafted = len(forward.drafts)
        return drafted < forward.draft_tokens and len(sequence) + drafted < self._max_seq_tokens


def _after(forward: Forward, sequence: KvSequence, token_ids: Sequence[int]) -> Forward:
    """The forward over a chosen token and the draft after it, of which the last row is needed."""
    own = Forward(
        0,
        forward.sequence,
        len(sequence),
        token_ids,
        output=choice_of(forward.output),
        prompt_len=forward.prompt_len,
    )
    own.kv = sequence
    return own
