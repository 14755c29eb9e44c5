"""ModelExecutor: the trait every executor has, all of it reduced to one primitive.

The primitive is a forward over a mixed batch, in four moves that the step loop and the direct methods share:

    begin(op)     match the prefix cache, reserve pages
    execute(...)  one forward over chunks of several operations
    complete(op)  settle what is kept, release what was temporary
    roll_back(op) leave the sequence as it was before the operation

Sequences are named by integers that the caller chooses. Not thread-safe: one thread owns an executor.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC
from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.batch import BatchItem, pack, sampling_rows, score_targets
from workers.executors.info import Capabilities, ExecutorInfo, KvCapacity, StepCounters
from workers.kv.page_pool import OutOfPages
from workers.kv.table import KvSequence, KvStats, KvTable
from workers.kv.tensors import KvTensors
from workers.operations import (
    GREEDY,
    Accept,
    Forward,
    ForwardDone,
    Kind,
    OutputSpec,
    RowOutput,
    Rows,
    Sampling,
    TokenMask,
)
from workers.row_outputs import build_outputs, score_tokens
from workers.runners.base import DeviceLostError, Runner, device_errors
from workers.scheduler import Chunk


class KvMissing(Exception):
    """The sequence holds less than the operation's position says."""


class ModelExecutor(ABC):  # noqa: B024 - subclasses differ in how they are made, not in what they do
    """Owns the pages, the sequences and the runner."""

    def __init__(self, info: ExecutorInfo, table: KvTable, kv: KvTensors, runner: Runner) -> None:
        self._info = info
        self._table = table
        self._kv = kv
        self._runner = runner
        self._counters = StepCounters()
        self._op_ids = itertools.count(1)

    # The primitive.

    def begin(self, op: Forward) -> None:
        """Finds what of the operation is computed already and reserves pages for the rest.

        Cuts a sequence that is longer than the operation's position. A sequence unknown at position 0 is
        created. Raises KvMissing or OutOfPages, leaving at most an empty or cut sequence behind, which
        `roll_back` settles.
        """
        sequence = self._table.get(op.sequence)
        if sequence is None and op.position == 0:
            sequence = self._table.create(op.sequence)
        if sequence is None or len(sequence) < op.position:
            raise KvMissing(f"{len(sequence or ())} tokens of {op.position}")
        if len(sequence) > op.position:
            self._table.truncate(sequence, op.position)
        op.started_ns = time.monotonic_ns()
        op.reused = self._table.match_prefix(sequence, op.token_ids, _reusable_tokens(op))
        op.computed = op.reused
        with device_errors():
            self._kv.copy_pages(self._table.reserve(sequence, op.remaining))

    def execute(self, chunks: Sequence[Chunk]) -> None:
        """One forward over chunks of operations that have begun; their outputs are added to them.

        On an exception nothing has been appended: the step may be run again, or its operations rolled back.
        """
        items = [BatchItem(chunk, self._sequence(chunk.op.sequence)) for chunk in chunks]
        inputs = pack(items, self._kv.page_size)
        with device_errors():
            result = self._runner.step(inputs, sampling_rows(items))
            specs = [item.chunk.op.output for item in items for _ in item.wanted]
            outputs = build_outputs(result.logits, result.chosen, specs)
            scores = self._scores(items, result.logits)
        first = 0
        for item, item_scores in zip(items, scores, strict=True):
            last = first + len(item.wanted)
            op = item.chunk.op
            op.token_logprobs.extend(item_scores)
            op.outputs.extend(outputs[first:last])
            op.steps += 1
            self._table.append(item.sequence, item.token_ids)
            first = last
        self._counters.steps += 1
        self._counters.batch_items += len(items)
        self._counters.step_tokens += len(inputs.token_ids)

    def complete(self, op: Forward, batch_items: int = 1) -> ForwardDone:
        """Settles an operation whose tokens are all in the cache, and returns its answer."""
        sequence = self._sequence(op.sequence)
        kept = len(op.token_ids) if op.accept is Accept.ALL else 1 + _accepted_drafts(op)
        self._table.truncate(sequence, op.position + kept)
        if op.ephemeral:
            self._table.release(op.sequence)
        now_ns = time.monotonic_ns()
        self._count(op, now_ns)
        return ForwardDone(
            op_id=op.op_id,
            sequence=op.sequence,
            outputs=op.outputs,
            kept=kept,
            reused=op.reused,
            token_logprobs=op.token_logprobs,
            queue_ns=max(0, op.started_ns - op.arrived_ns) if op.arrived_ns else 0,
            compute_ns=now_ns - op.started_ns,
            steps=op.steps,
            batch_items=batch_items,
        )

    def roll_back(self, op: Forward) -> None:
        """Leaves the operation's sequence as it was before it."""
        sequence = self._table.get(op.sequence)
        if sequence is None:
            return
        if op.ephemeral or op.position == 0:
            # At position 0 there was nothing: either it was unknown, or empty, which is the same.
            self._table.release(op.sequence)
        elif len(sequence) >= op.position:
            self._table.truncate(sequence, op.position)

    def _sequence(self, key: int) -> KvSequence:
        sequence = self._table.get(key)
        if sequence is None:
            raise KvMissing(f"sequence {key} is not known")
        return sequence

    @staticmethod
    def _scores(items: Sequence[BatchItem], logits: torch.Tensor) -> list[list[float]]:
        """For each item the log-probabilities of the tokens that follow its own, if it asks for them."""
        scores, first = [], 0
        for item in items:
            targets = score_targets(item)
            rows = logits[first : first + len(targets)]
            scores.append(score_tokens(rows, torch.tensor(targets)) if targets else [])
            first += len(item.wanted)
        return scores

    def _count(self, op: Forward, now_ns: int) -> None:
        counters, took_ns = self._counters, now_ns - op.started_ns
        if op.kind is Kind.DECODE:
            counters.decode_operations += 1
            counters.decode_ns += took_ns
        else:
            counters.prefill_operations += 1
            counters.prefill_ns += took_ns

    # The trait, for callers in the same process. Each data method is one forward.

    def info(self) -> ExecutorInfo:
        """The model and how it is run now."""
        return replace(self._info, runner=self._runner.name)

    def prefill(self, sequence: int, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> RowOutput:
        """Appends tokens to a sequence, new or known; says what follows the last of them."""
        return self.batch_prefill([(sequence, token_ids, output)])[0]

    def batch_prefill(self, items: Sequence[tuple[int, Sequence[int], OutputSpec]]) -> list[RowOutput]:
        """Several prefills in one forward."""
        ops = [self._op(key, tokens, output, Kind.PREFILL) for key, tokens, output in items]
        return [op.outputs[-1] for op in self._run(ops)]

    def decode(self, sequence: int, token_id: int, output: OutputSpec = GREEDY) -> RowOutput:
        """Appends one token; says what follows it."""
        return self.batch_decode([(sequence, token_id, output)])[0]

    def batch_decode(self, items: Sequence[tuple[int, int, OutputSpec]]) -> list[RowOutput]:
        """One decode for each of several sequences, in one forward."""
        ops = [self._op(key, [token], output, Kind.DECODE) for key, token, output in items]
        return [op.outputs[-1] for op in self._run(ops)]

    def unified_decode(
        self, items: Sequence[tuple[int, Sequence[int], Rows, OutputSpec]]
    ) -> list[list[RowOutput]]:
        """A mixed batch in one forward: decodes, prefills and chunks; the wanted rows of each."""
        ops = []
        for key, tokens, rows, output in items:
            kind = Kind.DECODE if len(tokens) == 1 else Kind.PREFILL
            ops.append(self._op(key, tokens, output, kind, rows))
        return [op.outputs for op in self._run(ops)]

    def forward_verify(
        self,
        sequence: int,
        token_ids: Sequence[int],
        output: OutputSpec = GREEDY,
        accept: Accept = Accept.ALL,
    ) -> tuple[list[RowOutput], int]:
        """Appends n + 1 tokens in one forward; what follows each, and how many drafts were kept."""
        op = self._op(sequence, token_ids, output, Kind.VERIFY, Rows.ALL)
        op.accept = accept
        self._run([op])
        return op.outputs, len(self._sequence(sequence)) - op.position - 1

    def forward(self, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> list[RowOutput]:
        """Scores tokens without keeping a cache; what follows each."""
        op = self._op(-1, token_ids, output, Kind.SCORE, Rows.ALL)
        op.ephemeral = True
        return self._run([op])[0].outputs

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of another. Raises KvMissing if that is unknown."""
        parent = self._sequence(sequence)
        for child in children:
            self._table.fork(parent, child)

    def truncate_kv(self, sequence: int, new_len: int) -> None:
        """Cuts a sequence and frees its pages. Raises KvMissing, and ValueError past the end."""
        self._table.truncate(self._sequence(sequence), new_len)

    def release_cache(self, sequence: int) -> bool:
        """Forgets a sequence; False if it was not known."""
        return self._table.release(sequence)

    def kv_capacity(self) -> KvCapacity:
        """The pool's pages. Safe to call from another thread: it reads counters only."""
        stats = self._table.stats()
        return KvCapacity(
            page_size_tokens=self._kv.page_size,
            bytes_per_page=self._kv.bytes_per_page,
            total=stats.pages_total,
            free=stats.pages_free,
            cached=stats.pages_cached,
        )

    @property
    def supports_native_unified_decode(self) -> bool:
        """Decodes and prefills share one forward."""
        return True

    def capabilities(self) -> Capabilities:
        """What the executor can do."""
        return Capabilities(
            native_unified_decode=self.supports_native_unified_decode,
            verify=True,
            fork=True,
            sampling=True,
            prefix_reuse=True,
            lora=False,
        )

    def status(self) -> StepCounters:
        """What was run since the start. A live object: read it, do not keep it."""
        return self._counters

    def cache_metrics_snapshot(self) -> KvStats:
        """How the pages are used."""
        return self._table.stats()

    def lora_metrics_snapshot(self) -> Sequence[object]:
        """How adapters are used: none, as `capabilities` says."""
        return ()

    def check_integrity(self) -> None:
        """Raises IntegrityError if the pool contradicts the sequences."""
        self._table.check_integrity()

    def warmup(self) -> None:
        """Real steps of each kind, so that the first caller of any waits for nothing. Leaves no trace."""
        key, other = -2, -3
        # Less than a page, so that nothing of it stays in the prefix index.
        length = max(1, min(self._info.max_seq_len, self._kv.page_size) - 5)
        self.prefill(key, [i % self._info.vocab_size for i in range(length)])
        self.decode(key, 0)
        masked = OutputSpec(mask=TokenMask(allowed=(0, 1)))
        self.decode(key, 0, masked)
        drawn = OutputSpec(sampling=Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1))
        self.unified_decode([(key, [0], Rows.LAST, drawn), (other, [0, 0], Rows.LAST, masked)])
        self.release_cache(key)
        self.release_cache(other)
        self._counters = StepCounters()

    def shutdown(self) -> None:
        """Forgets all sequences."""
        for sequence in list(self._table):
            self._table.release(sequence.key)

    def _op(
        self,
        key: int,
        token_ids: Sequence[int],
        output: OutputSpec,
        kind: Kind,
        rows: Rows = Rows.LAST,
    ) -> Forward:
        sequence = self._table.get(key)
        position = len(sequence) if sequence is not None else 0
        return Forward(
            op_id=next(self._op_ids),
            sequence=key,
            position=position,
            token_ids=token_ids,
            rows=rows,
            output=output,
            kind=kind,
            prompt_len=position + len(token_ids) if kind is Kind.PREFILL else position,
        )

    def _run(self, ops: Sequence[Forward]) -> Sequence[Forward]:
        """All operations in one forward, all or nothing."""
        begun = []
        try:
            for op in ops:
                begun.append(op)
                self.begin(op)
            self.execute([Chunk(op, op.computed, op.remaining, True) for op in ops])
        except Exception:
            for op in reversed(begun):
                self.roll_back(op)
            raise
        for op in ops:
            op.computed = len(op.token_ids)
            self.complete(op, len(ops))
        return ops


def _reusable_tokens(op: Forward) -> int:
    """How many of the operation's first tokens need no row of their own, so that their KV may be reused.

    One token is always left to compute, so that every operation takes part in a step.
    """
    return 0 if op.rows is Rows.ALL else len(op.token_ids) - 1


def _accepted_drafts(op: Forward) -> int:
    """Drafts that equal the token chosen before them, up to the first that does not."""
    accepted = 0
    for draft, output in zip(op.token_ids[1:], op.outputs, strict=False):
        if draft != output.token_id:
            break
        accepted += 1
    return accepted


__all__ = ["DeviceLostError", "KvMissing", "ModelExecutor", "OutOfPages"]
