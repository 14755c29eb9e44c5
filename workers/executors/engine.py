"""The engine: forwards over mixed batches of operations, in four moves that the step loop drives.

    begin(op)            match the prefix cache, reserve pages
    execute(chunks)      one forward over chunks of several operations
    complete(running)    settle what is kept, release what was temporary
    roll_back(running)   leave the sequence as it was before the operation

Sequences are named by integers that the caller chooses. Not thread-safe: one thread owns an engine; `metrics`
may be read by any. It does not know what a model is called, nor who asks; `base` is its face to callers in
the same process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.batch import output_specs, pack, sampling_rows, score_targets, taps_of
from workers.distribution import sampled_logprobs, with_drafts
from workers.executors.errors import DuplicateSequence, KvMissing, NoTrees, TruncateBeyondEnd
from workers.executors.info import StepCounts
from workers.kv.table import KvSequence, KvTable, PoolUsage
from workers.kv.tensors import KvTensors
from workers.models.taps import Taps
from workers.more_draws import draw_more
from workers.operations import Accept, Forward, ForwardDone, Kind, OutputSpec, RowOutput
from workers.row_outputs import TokenScores, add_hidden, build_outputs, score_tokens
from workers.runners.base import Runner, StepResult, device_errors
from workers.running import Chunk, RunningForward
from workers.sampling import SamplingRow
from workers.token_trees import kept_path
from workers.underway import Underway


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot. What the steps' fields mean, `ExecutorStatus` says."""

    pool: PoolUsage
    counts: StepCounts
    step_age_ns: int
    step_number: int
    step_expected_ns: int


class Engine:
    """Owns the pages, the sequences, the runner and the counts."""

    def __init__(self, kv_table: KvTable, kv: KvTensors, runner: Runner, *, takes_trees: bool = True) -> None:
        """`takes_trees`: the model attends token trees."""
        self.kv = kv
        self.takes_trees = takes_trees
        self.runner = runner
        self._kv_table = kv_table
        # Whose pages an operation that has not begun had better wait for.
        self.underway = Underway(kv_table)
        self._counts = StepCounts()
        # In time.monotonic_ns(); 0 between steps.
        self._step_began_ns = 0
        self._step_number = 0
        self._step_tokens = 0
        # The best pace of a step so far: that of long steps, which short ones would overstate. 0: none yet.
        self._ns_per_token = 0.0

    def begin(self, op: Forward) -> RunningForward:
        """Finds what of the operation is computed already and reserves pages for the rest.

        Cuts a sequence that is longer than the operation's position. A sequence unknown at position 0 is
        created. Raises KvMissing, OutOfPages or NoTrees; then nothing is left of it but the cut.
        """
        if op.parents and not self.takes_trees:
            raise NoTrees("the model attends no token trees")
        table = self._kv_table
        sequence = table.get(op.sequence)
        if sequence is None and op.position == 0:
            sequence = table.create(op.sequence, op.salt)
        length = 0 if sequence is None else len(sequence)
        if sequence is None or length < op.position:
            raise KvMissing(f"{length} tokens of {op.position}")
        if length > op.position:
            table.truncate(sequence, op.position)
        started_ns = time.monotonic_ns()
        # One token is always left to compute, so that every operation takes part in a step.
        reusable_tokens = len(op.token_ids) - max(op.wanted_rows, 1)
        try:
            reused = table.match_prefix(sequence, op.token_ids, reusable_tokens) if reusable_tokens else 0
            copies = table.reserve(sequence, len(op.token_ids) - reused)
            if copies:
                self._copy_pages(sequence, copies)
        except Exception:
            self._restore(op)
            raise
        if op.kind is Kind.PREFILL:
            table.count_prompt(len(op.token_ids), reused)
        running = RunningForward(op, sequence, reused, computed=reused, started_ns=started_ns)
        self.underway.goes_on(running)
        return running

    def _copy_pages(self, sequence: KvSequence, copies: Sequence[tuple[int, int]]) -> None:
        try:
            with device_errors():
                self.kv.copy_pages(copies)
        except Exception:
            self._kv_table.take_back(sequence, copies)
            raise

    def execute(self, chunks: Sequence[Chunk]) -> None:
        """One forward over chunks of operations that have begun; adds their outputs to them.

        Those of which a row has no token get their `failure` instead, and the others go on without them.
        On an exception nothing has been appended: the step may be run again, or its operations rolled back.
        """
        tokens = sum([chunk.count for chunk in chunks])
        began_ns = time.monotonic_ns()
        self._step_number += 1
        self._step_tokens = tokens
        self._step_began_ns = began_ns
        try:
            self._execute(chunks)
        finally:
            self._step_began_ns = 0
        pace = (time.monotonic_ns() - began_ns) / tokens
        self._ns_per_token = min(self._ns_per_token or pace, pace)

    def _execute(self, chunks: Sequence[Chunk]) -> None:
        inputs = pack(chunks, self.kv.page_size)
        with device_errors():
            rows, specs = sampling_rows(chunks), output_specs(chunks)
            taps = taps_of(specs)
            result = self.runner.step(inputs, rows, taps)
            if result.failed:
                chunks, result, rows, specs = _without_failed(chunks, result, rows, specs, taps)
            chosen = with_drafts(result.logits, result.chosen, rows)
            outputs = build_outputs(result.logits, chosen, specs)
            if taps is not None:
                add_hidden(outputs, specs, taps.found)
            said = [output.token_id for output in outputs]
            for row, logprob in sampled_logprobs(result.logits, said, rows, specs).items():
                outputs[row].sampled_logprob = logprob
            scores = _scores(chunks, result.logits)
            draws = _draws(chunks, result.logits, rows)
            # The last that may fail: what it overwrites, another attempt would need.
            paths = self._keep_paths(chunks, outputs)
        first = 0
        for chunk in chunks:
            running, last = chunk.running, first + chunk.rows
            if not chunk.op.parents:
                self._kv_table.append(running.sequence, chunk.token_ids)
            elif chunk.is_last:
                running.kept_path = paths[running]
                self._kv_table.append(running.sequence, [chunk.op.token_ids[i] for i in running.kept_path])
            running.computed += chunk.count
            running.steps += 1
            self.underway.goes_on(running)
            running.outputs += outputs[last - chunk.told : last]
            if running in scores:
                indexes, said_of_them = scores[running]
                running.add_scores(indexes, said_of_them.logprobs, said_of_them.is_argmax)
            running.draws = draws.get(running)
            first = last
        self._counts.steps += 1
        self._counts.batch_items += len(chunks)
        self._counts.step_tokens += self._step_tokens

    def _keep_paths(
        self, chunks: Sequence[Chunk], outputs: Sequence[RowOutput]
    ) -> dict[RunningForward, list[int]]:
        """The paths that stay of trees that are computed now. Moves their KV to where it belongs."""
        paths: dict[RunningForward, list[int]] = {}
        moves: list[tuple[int, int]] = []
        first = 0
        for chunk in chunks:
            running, op, last = chunk.running, chunk.op, first + chunk.rows
            if op.parents and chunk.is_last:
                said = [output.token_id for output in (*running.outputs, *outputs[first:last])]
                path = kept_path(op.token_ids, op.parents, said) if op.accept is not Accept.ALL else [0]
                paths[running] = path
                slots = [self._kv_table.slot(running.sequence, op.position + index) for index in path]
                places = (self._kv_table.slot(running.sequence, op.position + k) for k in range(len(path)))
                moves += [(slot, place) for slot, place in zip(slots, places, strict=True) if slot != place]
            first = last
        if moves:
            self.kv.move_slots(moves)
        return paths

    def draw(self, running: RunningForward) -> int:
        """Draws some of the samples of a forward whose tokens are all in the cache.

        Returns what that has cost; see `draw_more`. 0: it has all.
        """
        if running.draws is None:
            return 0
        with device_errors():
            cost, samples = next(running.draws, (0, ()))
        running.samples += samples
        return cost

    def complete(self, running: RunningForward, batch_items: int) -> ForwardDone:
        """Settles an operation whose tokens are all in the cache, and returns its answer."""
        op = running.op
        while running.draws is not None and self.draw(running):
            pass
        if op.parents:
            kept = len(running.kept_path)
        else:
            kept = len(op.token_ids) if op.accept is Accept.ALL else 1 + _accepted_drafts(running)
        if kept < len(op.token_ids):
            self._kv_table.truncate(running.sequence, op.position + kept)
        if op.ephemeral:
            self._kv_table.release(op.sequence)
        compute_ns = time.monotonic_ns() - running.started_ns
        self._counts.add_operation(op.kind, compute_ns)
        return ForwardDone(
            op_id=op.op_id,
            sequence=op.sequence,
            outputs=running.outputs,
            kept=kept,
            reused=running.reused,
            token_logprobs=running.token_logprobs,
            token_is_argmax=running.token_is_argmax,
            queue_ns=max(0, running.started_ns - op.arrived_ns) if op.arrived_ns else 0,
            compute_ns=compute_ns,
            steps=running.steps,
            batch_items=batch_items,
            samples=running.samples,
            kept_path=running.kept_path,
        )

    def roll_back(self, running: RunningForward) -> None:
        """Leaves the operation's sequence as it was before it."""
        self.underway.ended(running)
        self._restore(running.op)

    def _restore(self, op: Forward) -> None:
        sequence = self._kv_table.get(op.sequence)
        if op.ephemeral or op.position == 0:
            # At position 0 there was nothing: either it was unknown, or empty, which is the same.
            self._kv_table.release(op.sequence)
        elif sequence is not None and len(sequence) >= op.position:
            self._kv_table.truncate(sequence, op.position)

    @property
    def sequences(self) -> Iterable[KvSequence]:
        """All that are known, to be looked at: the next move changes them."""
        return self._kv_table

    def length(self, sequence: int) -> int | None:
        """Tokens of a sequence; None if it is not known."""
        known = self._kv_table.get(sequence)
        return None if known is None else len(known)

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of another. Raises KvMissing or DuplicateSequence."""
        parent = self._known(sequence)
        if len(set(children)) < len(children) or any(map(self._kv_table.get, children)):
            raise DuplicateSequence(f"children {list(children)} of {sequence}")
        self._kv_table.fork_all(parent, children)

    def truncate(self, sequence: int, new_len: int) -> None:
        """Cuts a sequence and frees its pages. Raises KvMissing or TruncateBeyondEnd."""
        known = self._known(sequence)
        if not 0 <= new_len <= len(known):
            raise TruncateBeyondEnd(f"{len(known)} tokens cannot be cut to {new_len}")
        self._kv_table.truncate(known, new_len)

    def release(self, sequence: int) -> bool:
        """Forgets a sequence; False if it was not known."""
        return self._kv_table.release(sequence)

    def release_all(self) -> None:
        """Forgets every sequence."""
        for sequence in list(self._kv_table):
            self._kv_table.release(sequence.key)

    @property
    def pages_available(self) -> int:
        """Pages that can be had. Reads numbers only."""
        return self._kv_table.pages_available

    def metrics(self) -> EngineMetrics:
        """How the pages are used, what was run, and whether a step runs. Reads numbers only."""
        began_ns = self._step_began_ns
        return EngineMetrics(
            pool=self._kv_table.usage(),
            counts=dataclasses.replace(self._counts),
            step_age_ns=time.monotonic_ns() - began_ns if began_ns else 0,
            step_number=self._step_number,
            step_expected_ns=int(self._step_tokens * self._ns_per_token) if began_ns else 0,
        )

    def reset_counts(self) -> None:
        """Counts from zero again: what warms up is nobody's."""
        self._counts = StepCounts()
        self._kv_table.reset_counts()

    def check_integrity(self) -> None:
        """Raises IntegrityError if the pool contradicts the sequences."""
        self._kv_table.check_integrity()

    def walk_integrity(self) -> Iterator[None]:
        """The same in slices, between which the engine may be used."""
        return self._kv_table.walk_integrity()

    def _known(self, sequence: int) -> KvSequence:
        known = self._kv_table.get(sequence)
        if known is None:
            raise KvMissing(f"sequence {sequence} is not known")
        return known


def _without_failed(
    chunks: Sequence[Chunk],
    result: StepResult,
    rows: Sequence[SamplingRow],
    specs: Sequence[OutputSpec],
    taps: Taps | None,
) -> tuple[list[Chunk], StepResult, list[SamplingRow], list[OutputSpec]]:
    """What is left of a step without the chunks of which a row has failed; sets why."""
    good: list[Chunk] = []
    kept: list[int] = []
    first = 0
    for chunk in chunks:
        its = range(first, first + chunk.rows)
        chunk.running.failure = next((result.failed[row] for row in its if row in result.failed), None)
        if chunk.running.failure is None:
            good.append(chunk)
            kept += its
        first += chunk.rows
    if taps is not None:
        left_rows = set(kept)
        for layer, states in taps.found.items():
            taps.found[layer] = states[[at for at, row in enumerate(taps.rows[layer]) if row in left_rows]]
    left = StepResult(result.logits[kept], result.chosen[kept])
    return good, left, [rows[row] for row in kept], [specs[row] for row in kept]


def _scores(
    chunks: Sequence[Chunk], logits: torch.Tensor
) -> dict[RunningForward, tuple[list[int], TokenScores]]:
    """Which tokens of a request the rows of its chunk score, and what they say of them."""
    found: dict[RunningForward, tuple[list[int], TokenScores]] = {}
    first = 0
    for chunk in chunks:
        indexes, rows = score_targets(chunk) if chunk.op.scored else ([], [])
        if indexes:
            targets = torch.tensor([chunk.op.token_ids[index] for index in indexes])
            # The usual case is all rows of a part: a slice of them is not copied.
            in_line = rows[-1] - rows[0] + 1 == len(rows) and not chunk.op.parents
            picked = slice(first + rows[0], first + rows[-1] + 1)
            scores = score_tokens(
                logits[picked] if in_line else logits[[first + row for row in rows]], targets
            )
            found[chunk.running] = indexes, scores
        first += chunk.rows
    return found


def _draws(
    chunks: Sequence[Chunk], logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> dict[RunningForward, Iterator[tuple[int, list[RowOutput]]]]:
    """What draws more from the last row of a chunk, if that has an output."""
    draws: dict[RunningForward, Iterator[tuple[int, list[RowOutput]]]] = {}
    last = -1
    for chunk in chunks:
        op = chunk.op
        last += chunk.rows
        if op.sample_seeds and chunk.told:
            # A copy: the next step writes to the memory of the logits.
            row = logits[last].to(torch.float32, copy=True)
            draws[chunk.running] = draw_more(row, rows[last], op.sample_seeds, op.output)
    return draws


def _accepted_drafts(running: RunningForward) -> int:
    """Drafts that equal the token chosen before them, up to the first that does not."""
    accepted = 0
    for draft, output in zip(running.op.token_ids[1:], running.outputs, strict=False):
        if draft != output.token_id:
            break
        accepted += 1
    return accepted
