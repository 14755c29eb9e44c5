"""Executors for callers in the same process, without step loop and scheduler: for benchmarks and tests.

Each method runs one forward, completely or not at all. What is asked for is not checked: gateways do that.
The caller chooses the sequence numbers, from 0 on. Not thread-safe.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from workers.executors import llm, weightless
from workers.executors.base import ModelExecutor
from workers.given_experts import GivenExperts
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import GREEDY, OutputSpec, RowOutput

# Of what is not kept.
_SCORED = -1
_op_ids = itertools.count(1)


class InProcess(ModelExecutor):
    """An executor that is called directly. A method that raises has no effect.

    But an empty sequence may be removed.
    """

    def prefill(self, sequence: int, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> RowOutput:
        """Appends tokens to a new or known sequence. Returns the output of the last one."""
        return self.batch_prefill([(sequence, token_ids, output)])[0]

    def batch_prefill(self, items: Sequence[tuple[int, Sequence[int], OutputSpec]]) -> list[RowOutput]:
        """Several prefills in one forward."""
        ops = [self._make_forward(key, tokens, 1, output, Kind.PREFILL) for key, tokens, output in items]
        return [done.outputs[-1] for done in self._run_all(ops)]

    def decode(self, sequence: int, token_id: int, output: OutputSpec = GREEDY) -> RowOutput:
        """Appends one token to a known sequence. Returns its output."""
        return self.batch_decode([(sequence, token_id, output)])[0]

    def batch_decode(self, items: Sequence[tuple[int, int, OutputSpec]]) -> list[RowOutput]:
        """One decode for each of several known sequences, in one forward."""
        ops = [self._make_forward(key, [token], 1, output, Kind.DECODE) for key, token, output in items]
        return [done.outputs[-1] for done in self._run_all(ops)]

    def unified_decode(
        self, items: Sequence[tuple[int, Sequence[int], int, OutputSpec]]
    ) -> list[Sequence[RowOutput]]:
        """Decodes, prefills and chunks in one forward. Returns the outputs of the last `rows` tokens each."""
        ops = []
        for key, tokens, rows, output in items:
            # A single token of an empty sequence is a prompt.
            is_decode = len(tokens) == 1 and rows > 0 and bool(self.engine.length(key))
            kind = Kind.DECODE if is_decode else Kind.PREFILL
            ops.append(self._make_forward(key, tokens, rows, output, kind))
        return [done.outputs for done in self._run_all(ops)]

    def forward_verify(
        self,
        sequence: int,
        token_ids: Sequence[int],
        output: OutputSpec = GREEDY,
        accept: Accept = Accept.ALL,
    ) -> tuple[Sequence[RowOutput], int]:
        """Appends n + 1 tokens to a known sequence. Returns their outputs, and how many drafts were kept."""
        op = self._make_forward(sequence, token_ids, len(token_ids), output, Kind.VERIFY, accept)
        (done,) = self._run_all([op])
        return done.outputs, done.kept - 1

    def verify_tree(
        self,
        sequence: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        output: OutputSpec = GREEDY,
    ) -> tuple[Sequence[RowOutput], Sequence[int]]:
        """Appends the path of a tree that the model chooses. Returns all outputs, and the path's indexes.

        See `workers.token_trees` for `parents`.
        """
        plain = self._make_forward(sequence, token_ids, len(token_ids), output, Kind.VERIFY, Accept.CHOSEN)
        op = dataclasses.replace(plain, parents=parents)
        (done,) = self._run_all([op])
        return done.outputs, done.kept_path if parents else range(done.kept)

    def forward(
        self, token_ids: Sequence[int], output: OutputSpec = GREEDY, experts: GivenExperts | None = None
    ) -> Sequence[RowOutput]:
        """Computes the outputs of all tokens, without keeping a cache."""
        op = self._make_forward(_SCORED, token_ids, len(token_ids), output, Kind.SCORE)
        if experts is not None:
            op = dataclasses.replace(op, experts=experts, salt=experts.salted(b""))
        (done,) = self._run_all([op])
        return done.outputs

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of a known one."""
        self.engine.fork(sequence, children)

    def truncate_kv(self, sequence: int, new_len: int) -> None:
        """Truncates a known sequence and frees its pages."""
        self.engine.truncate(sequence, new_len)

    def release_cache(self, sequence: int) -> bool:
        """Removes a sequence. False if it was not known."""
        return self.engine.release(sequence)

    def check_integrity(self) -> None:
        """Raises IntegrityError if pool and sequences disagree."""
        self.engine.kv_table.check_integrity()

    def _make_forward(
        self,
        key: int,
        token_ids: Sequence[int],
        rows: int,
        output: OutputSpec,
        kind: Kind,
        accept: Accept = Accept.ALL,
    ) -> Forward:
        position = self.engine.length(key) or 0
        return Forward(
            op_id=next(_op_ids),
            sequence=key,
            position=position,
            token_ids=token_ids,
            rows=rows,
            output=output,
            accept=accept,
            kind=kind,
            prompt_len=position + len(token_ids) if kind is Kind.PREFILL else position,
            ephemeral=kind is Kind.SCORE,
        )

    def _run_all(self, ops: Sequence[Forward]) -> Sequence[Forward]:
        """Runs all operations in one forward, or none. Returns them, complete."""
        try:
            for op in ops:
                self.engine.begin(op)
            self.engine.execute([Chunk(op, op.computed, op.remaining) for op in ops])
            _raise_failure(ops)
        except Exception:
            for op in reversed([op for op in ops if op.has_begun]):
                self.engine.roll_back(op)
            raise
        for op in ops:
            self.engine.complete(op)
        return ops


def _raise_failure(ops: Sequence[Forward]) -> None:
    """Raises the failure of the first forward that has one."""
    for op in ops:
        if op.failure is not None:
            raise op.failure


class LlmExecutor(InProcess, llm.LlmExecutor):
    """A model of a directory."""


class PagedAttentionExecutor(InProcess, weightless.PagedAttentionExecutor):
    """The weightless model."""
