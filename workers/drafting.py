"""Drafts tokens with a second, smaller model.

The answer to a forward that asks for drafts (`Forward.draft_tokens`) contains them, and its caller lets the
next forward of that sequence verify them. So all rows of a step draft together, after the step, and a caller
sends one command for each verify.

**Drafts are hints.** A wrong or missing one costs time, but never changes a text. So the KV of the draft
model is not stored, moved or journaled, and any of its sequences may be dropped at any time. When a sequence
of the model drafts, the draft model's sequence with the same number is first brought up to date: the common
prefix stays, the rest is cut, and what is missing is computed, in parts so that others do not wait long. So
forks, truncations, rejected drafts, evictions and replays need no notification.

A draft is drawn with the settings, seed and position of the row that will verify it. Draws are a function of
these (ADR 4), so where both models have similar distributions they choose the same token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.decodes import Column, Decodes
from workers.executors.engine import Engine
from workers.kv.page_pool import OutOfPages
from workers.kv.table import KvTable
from workers.operations import Chunk, Forward, Kind
from workers.outputs import GREEDY, OutputSpec

Tokens = NDArray[np.int64]


class Drafts(Protocol):
    """Drafts after a step: with a draft model, or with the model's own head (`head_drafting`)."""

    @property
    def tables(self) -> Sequence[KvTable]:
        """The tables of its own sequences and pages, beside that of the model."""

    def draft(self, forwards: Sequence[Forward], table: KvTable, until_ns: int | None = None) -> None:
        """Sets the `drafts` of complete forwards: for each at most as many as it asks for.

        Args:
            forwards: Of different sequences.
            table: The table of the model they ran on.
            until_ns: After this time.monotonic_ns() no further token is drafted. None: no limit.

        Raises what a step raises. Then there are no drafts, and the next call starts afresh.
        """


class Drafting:
    """`Drafts` with a draft model, whose sequences it owns. Only the thread of the step loop uses it.

    Attributes:
        engine: The engine of the draft model, with pages of its own.
    """

    def __init__(
        self, engine: Engine, *, vocab_sizes: tuple[int, int], max_seq_tokens: int, step_tokens: int
    ) -> None:
        """Take the engine of a draft model.

        vocab_sizes: of the draft model, and of the model for which it drafts.
        max_seq_tokens: the longest sequence of the draft model.
        step_tokens: the most missing tokens that are computed before drafting, in all sequences together.
        """
        self.engine = engine
        self._vocab_size, self._target_vocab_size = vocab_sizes
        self._max_seq_tokens = max_seq_tokens
        self._step_tokens = step_tokens
        # The draft model's sequences, least recently used first.
        self._used: dict[int, None] = {}

    @property
    def tables(self) -> Sequence[KvTable]:
        return (self.engine.kv_table,)

    def draft(self, forwards: Sequence[Forward], table: KvTable, until_ns: int | None = None) -> None:
        try:
            for unknown in [one for one in self._used if table.get(one) is None]:
                self._drop(unknown)
            begun = self._begin(forwards, table)
            self._run([own for _, own in begun])
            if drafting := [pair for pair in begun if pair[1].outputs]:
                self._follow(drafting, until_ns)
        except Exception:
            for forward in forwards:
                self._drop(forward.sequence)
            raise

    def _drop(self, sequence: int) -> None:
        self._used.pop(sequence, None)
        self.engine.release(sequence)

    def _begin(self, forwards: Sequence[Forward], table: KvTable) -> list[tuple[Forward, Forward]]:
        """Begins a forward of the draft model for each of `forwards`, over the tokens that it lacks.

        One without a row does not draft yet: more tokens are missing than may be computed now.
        """
        room, begun = self._step_tokens, list[tuple[Forward, Forward]]()
        for forward in forwards:
            own = self._next(forward, table, room)
            if own is not None and self._find_pages(own, forwards):
                self._used[own.sequence] = None
                room -= own.remaining
                begun.append((forward, own))
        return begun

    def _next(self, forward: Forward, table: KvTable, room: int) -> Forward | None:
        """The draft model's forward over its missing tokens, at most `room`. None: it cannot draft."""
        sequence = table.get(forward.sequence)
        if sequence is None or not room:
            return None
        chosen = forward.outputs[forward.kept - len(forward.token_ids) - 1].token_id
        tokens = np.append(sequence.token_ids.as_array().astype(np.int64), chosen)
        salt = table.prefixes.salt_of(sequence)
        common = self._common(forward.sequence, salt, tokens)
        missing = tokens[common:]
        if len(tokens) >= self._max_seq_tokens or int(missing.max()) >= self._vocab_size:
            self._drop(forward.sequence)
            return None
        is_all = len(missing) <= room
        # The most recently used last.
        self._used.pop(forward.sequence, None)
        return Forward(
            0,
            forward.sequence,
            common,
            missing[:room].tolist(),
            rows=int(is_all),
            output=self._output(forward.output),
            prompt_len=forward.prompt_len,
            salt=salt,
        )

    def _common(self, sequence: int, salt: bytes, tokens: Tokens) -> int:
        """How many first tokens the draft model has. Not all of them: the row of the last one is needed."""
        known = self.engine.kv_table.get(sequence)
        if known is None:
            return 0
        if self.engine.kv_table.prefixes.salt_of(known) != salt:
            self._drop(sequence)
            return 0
        own = known.token_ids.as_array()
        compared = min(len(own), len(tokens) - 1)
        differs = (own[:compared] != tokens[:compared]).nonzero()[0]
        return int(differs[0]) if len(differs) else compared

    def _output(self, output: OutputSpec) -> OutputSpec:
        """How the draft model chooses: as the model does, as far as their vocabularies agree."""
        sampling, mask = output.sampling, output.mask
        if self._vocab_size != self._target_vocab_size:
            mask = None
            sampling = None if sampling is None else replace(sampling, logit_bias={})
        return choice_of(replace(output, sampling=sampling, mask=mask))

    def _find_pages(self, own: Forward, forwards: Sequence[Forward]) -> bool:
        """Begins a forward. If pages are missing, drops other sequences, least recently used first.

        False: even without the sequences that do not draft now there are too few.
        """
        drafting = {forward.sequence for forward in forwards}
        while True:
            try:
                self.engine.begin(own)
            except OutOfPages:
                dropped = next((sequence for sequence in self._used if sequence not in drafting), None)
                if dropped is None:
                    self._drop(own.sequence)
                    return False
                self._drop(dropped)
            else:
                return True

    def _run(self, forwards: Sequence[Forward]) -> None:
        """Computes the missing tokens, and the first token of each draft."""
        if forwards:
            self.engine.execute([Chunk(own, own.computed, own.remaining) for own in forwards])
        for own in forwards:
            if own.failure is not None:
                self._drop(own.sequence)
            else:
                self.engine.complete(own)

    def _follow(self, drafting: Sequence[tuple[Forward, Forward]], until_ns: int | None) -> None:
        """Drafts one token after another, for all sequences in the same steps."""
        by_sequence = {own.sequence: forward for forward, own in drafting}
        ends = {own.sequence: self._end(forward, own) for forward, own in drafting}
        decodes = _decodes_after([own for _, own in drafting])
        while decodes.size:
            goes_on = np.zeros(decodes.size, np.bool_)
            positions, tokens = decodes.column(Column.POSITION), decodes.column(Column.TOKEN)
            for index, sequence in enumerate(decodes.sequences):
                # The token of the decode, which is not in the sequence yet, is the next one of the draft.
                if tokens[index] < self._target_vocab_size:
                    by_sequence[sequence].drafts = (*by_sequence[sequence].drafts, tokens[index])
                    goes_on[index] = positions[index] + 1 < ends[sequence]
            if until_ns is not None and time.monotonic_ns() >= until_ns:
                return
            decodes = decodes.take(goes_on)
            begun = self.engine.begin_decodes(decodes) if decodes.size else goes_on
            decodes = decodes.take(begun)
            if not decodes.size:
                return
            decodes = self.engine.execute((), decodes)
            decodes = Decodes(decodes.columns.copy(), decodes.outputs)
            decodes.columns[Column.POSITION] += 1
            decodes.columns[Column.TOKEN] = decodes.columns[Column.CHOSEN]

    def _end(self, forward: Forward, own: Forward) -> int:
        """The position after the last token of a draft."""
        first = own.position + len(own.token_ids)
        return min(first + forward.draft_tokens, self._max_seq_tokens)


def choice_of(output: OutputSpec) -> OutputSpec:
    """The part of the output settings that says how a token is chosen."""
    sampling, mask = output.sampling, output.mask
    return GREEDY if sampling is None and mask is None else OutputSpec(sampling=sampling, mask=mask)


def _decodes_after(forwards: Sequence[Forward]) -> Decodes:
    """The decodes of the tokens that forwards have chosen."""
    return Decodes.of(
        [
            Forward(
                0,
                own.sequence,
                own.position + len(own.token_ids),
                (own.outputs[-1].token_id,),
                output=own.output,
                kind=Kind.DECODE,
                prompt_len=own.prompt_len,
            )
            for own in forwards
        ]
    )
