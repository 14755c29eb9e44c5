"""The engine runs forwards over mixed batches, in five operations that the step loop calls.

    begin(forward)              match the prefix cache, reserve pages
    begin_decodes(decodes)      reserve a slot for each of many plain decodes
    execute(chunks, decodes)    run one batch, and append the tokens
    complete(forward)           truncate to the accepted tokens, release temporary sequences
    roll_back(forward)          restore the sequence to its state before the forward

On a GPU a step of plain decodes is launched, and its results are read later: see `launched_steps`.

The caller chooses the sequence numbers. Not thread-safe: one thread owns an engine. Only `stats.status`, and
`usage` and `pages_available` of its table, may be called by any thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workers.batch import captured_rows, output_specs, pack, sampling_rows
from workers.decodes import NO_DECODES, Column, Decodes, Mask
from workers.distribution import apply_drafts
from workers.executors.step_results import accepted_drafts, draws_of, row_outputs, scores_of, without_failed
from workers.executors.step_stats import StepStats
from workers.kv.sequence import KvSequence
from workers.kv.states import StateSlots
from workers.kv.table import KvTable
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import OutputSpec, RowOutput
from workers.prefix_wait import PrefixWaits
from workers.row_outputs import add_captured, add_means
from workers.runners.base import Runner, StepResult, raise_if_lost
from workers.runners.eager import EagerRunner
from workers.sampling import SamplingRow
from workers.token_trees import kept_path


class KvMissing(Exception):
    """The sequence is unknown, or shorter than the forward's position. The call had no effect."""


class NoTrees(Exception):
    """The model's attention does not support token trees. The call had no effect."""


class Engine:
    """Owns the pages, the sequences, the runner and the counts.

    A call that raises KvMissing, NoTrees, OutOfPages or SamplingError has no effect. DeviceLostError: see
    `raise_if_lost`.
    """

    def __init__(
        self,
        kv_table: KvTable,
        kv: KvTensors,
        runner: Runner,
        *,
        takes_trees: bool = True,
        batch_invariant: bool = False,
        num_experts: int = 0,
    ) -> None:
        """`takes_trees`, `batch_invariant` and `num_experts` are those of the model."""
        self.kv = kv
        self.takes_trees = takes_trees
        self.batch_invariant = batch_invariant
        self.runner = runner
        self._num_experts = num_experts
        self.kv_table = kv_table
        # Lets forwards wait for pages that others are computing.
        self.prefix_waits = PrefixWaits(kv_table)
        self.stats = StepStats(kv.device)

    def begin(self, forward: Forward) -> None:  # noqa: C901 - it runs for each forward, as few calls
        """Reuses pages of the prefix cache for a forward, and reserves pages for the rest.

        Truncates the sequence to the forward's position if it is longer. Creates an unknown sequence at
        position 0. Raises KvMissing, OutOfPages or NoTrees; then it has no effect but the truncation.
        """
        if forward.parents and not self.takes_trees:
            raise NoTrees("the model supports no token trees")
        table, position = self.kv_table, forward.position
        sequence = table.get(forward.sequence)
        if sequence is None and position == 0:
            sequence = table.create(forward.sequence, forward.salt)
        length = 0 if sequence is None else len(sequence)
        if sequence is None or length < position:
            raise KvMissing(f"{length} tokens of {position}")
        if length > position:
            table.truncate(sequence, position)
        started_ns = time.monotonic_ns()
        # At least one token is left to compute, so that every forward is part of a step.
        tokens, reused = len(forward.token_ids), 0
        reusable_tokens = tokens - max(forward.wanted_rows, 1)
        try:
            if reusable_tokens:
                reused = table.match_prefix(sequence, forward.token_ids, reusable_tokens)
            copies = table.reserve(sequence, tokens - reused)
            if copies:
                self._copy_pages(sequence, copies)
            if table.states is not None:
                self._begin_from_state(table.states, sequence)
        except Exception:
            self._restore(forward)
            raise
        if forward.kind is Kind.PREFILL:
            table.count_prompt(tokens, reused)
        forward.has_begun, forward.kv, forward.started_ns = True, sequence, started_ns
        forward.reused = forward.computed = reused
        if tokens - reused >= table.page_size:
            self.prefix_waits.progressed(forward)

    def begin_decodes(self, decodes: Decodes, allowed: Mask | None = None) -> Mask:
        """As `begin`, for plain decodes. Only begins those whose sequence ends at their position.

        Returns [N] bool, which of the `allowed` ones (None: all) have begun. Has no effect on the others:
        they may need `begin`, for a truncation or a copy of a page.
        """
        decodes.started_ns = time.monotonic_ns()
        if self.kv_table.states is not None:
            allowed = self._with_states(self.kv_table.states, decodes, allowed)
        decodes.rows, begun = self.kv_table.reserve_next(
            decodes.sequences, decodes.columns[Column.POSITION], allowed
        )
        if self.kv_table.states is not None:
            for sequence in decodes.take(begun).sequences:
                self.kv_table.states.begin(self._sequence(sequence))
        return begun

    def _begin_from_state(self, states: StateSlots, sequence: KvSequence) -> None:
        if not states.is_near(sequence):
            raise KvMissing(f"the recurrent state of {sequence.key}")
        states.begin(sequence)

    def _with_states(self, states: StateSlots, decodes: Decodes, allowed: Mask | None) -> Mask:
        """The decodes of `allowed` whose recurrent state is present, as many as there is room for."""
        known = map(self.kv_table.get, decodes.sequences)
        found = np.array([seq is not None and states.is_near(seq) for seq in known], np.bool_)
        if allowed is not None:
            found &= allowed
        return found & (found.cumsum() <= states.room)

    def as_chunks(self, decodes: Decodes) -> list[Chunk]:
        """Plain decodes that have begun, to be run one by one."""
        forwards = decodes.forwards()
        for forward in forwards:
            forward.kv = self._sequence(forward.sequence)
            forward.has_begun, forward.started_ns = True, decodes.started_ns
        return [Chunk(forward, 0, 1) for forward in forwards]

    def reserve(self, sequence: KvSequence, count: int) -> None:
        """Reserves `count` slots after a sequence, for drafts. Truncating it to its length frees them.

        Raises OutOfPages.
        """
        if copies := self.kv_table.reserve(sequence, count):
            self._copy_pages(sequence, copies)

    def draft(self, forwards: Sequence[Forward], hidden: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Runs the model's head for multi-token prediction over the last token of each forward.

        Args:
            forwards: N, which have slots for their tokens. Nothing is appended.
            hidden: [N, C] the hidden state of the token before the last one of each: see `Decoder.draft`.

        Returns:
            The drafted token of each, and [N, C] the hidden states for the next draft.
        """
        ends = [len(forward.token_ids) - 1 for forward in forwards]
        chunks = [Chunk(forward, end, 1) for forward, end in zip(forwards, ends, strict=True)]
        whole = [Chunk(forward, 0, end + 1) for forward, end in zip(forwards, ends, strict=True)]
        assert isinstance(self.runner, EagerRunner)
        self.stats.step_begins(len(forwards), time.monotonic_ns())
        try:
            return self.runner.draft(pack(chunks, self.kv.page_size), sampling_rows(whole), hidden)
        except Exception as error:
            raise_if_lost(error)
            raise
        finally:
            self.stats.step_ends(0)

    def _copy_pages(self, sequence: KvSequence, copies: Sequence[tuple[int, int]]) -> None:
        try:
            self.kv.copy_pages(copies)
        except Exception as error:
            self.kv_table.take_back(sequence, copies)
            raise_if_lost(error)
            raise

    def execute(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> Decodes:
        """Runs one batch of plain decodes and chunks that have begun, and writes the outputs into them.

        Returns the decodes without those that failed. If a row gets no token, its forward gets a `failure`,
        or its decode an entry in `failures`; the others are not affected. After an exception nothing has been
        appended: the caller may run the step again, or roll back what has begun.
        """
        tokens = decodes.size + (sum([chunk.count for chunk in chunks]) if chunks else 0)
        self.stats.step_begins(tokens, time.monotonic_ns())
        try:
            done = self._execute(chunks, decodes)
        except Exception:
            self.stats.step_ends(0)
            raise
        self.stats.step_ends(decodes.size + len(chunks))
        return done

    def history_of(self, decodes: Decodes, index: int) -> NDArray[np.int64]:
        """The tokens of a sequence and of its decode. See `HistoryOf`."""
        known = self._sequence(decodes.sequences[index]).token_ids.as_array().astype(np.int64)
        return np.append(known, decodes.columns[Column.TOKEN, index])

    def _execute(self, chunks: Sequence[Chunk], decodes: Decodes) -> Decodes:
        items, tables = decodes.size + len(chunks), self.kv_table.page_tables.of(decodes.rows)
        inputs = pack(chunks, self.kv.page_size, decodes, tables)
        if self.kv_table.states is not None:
            parts = [(self._sequence(sequence), 1) for sequence in decodes.sequences]
            parts += [(chunk.forward.kv, chunk.count) for chunk in chunks]
            inputs.states = self.kv_table.states.run(parts)
        try:
            rows = sampling_rows(chunks, decodes, self.history_of)
            # If only tokens are requested, no object is made for each row.
            is_bare = not chunks and all([spec.is_token_only for spec in decodes.distinct_outputs])  # noqa: C419 - faster
            specs = [] if is_bare else output_specs(chunks, decodes)
            capture = captured_rows(specs) if specs else None
            result = self.runner.step(inputs, rows, capture)
            if result.failed:
                good = without_failed(chunks, decodes, result, rows, specs, capture)
                return self._commit(*good, capture, items)
            return self._commit(chunks, decodes, result, rows, specs, capture, items)
        except Exception as error:
            raise_if_lost(error)
            raise

    def _commit(
        self,
        chunks: Sequence[Chunk],
        decodes: Decodes,
        result: StepResult,
        rows: Sequence[SamplingRow],
        specs: Sequence[OutputSpec],
        capture: RowCapture | None,
        items: int,
    ) -> Decodes:
        """Appends the tokens of a step in which every row got one, and writes the outputs.

        rows, specs: [R] one for each row of `result`. No specs: only tokens are requested.
        items: The number of forwards in the step.
        """
        first, chosen, outputs = decodes.size, result.chosen, list[RowOutput]()
        if specs:
            chosen = apply_drafts(result.logits, chosen, rows)
            outputs = row_outputs(result.logits, chosen, rows, specs)
            if capture is not None:
                add_captured(outputs, specs, capture, self._num_experts)
        scores = scores_of(chunks, result.logits[first:]) if chunks else {}
        draws = draws_of(chunks, result.logits[first:], rows[first:]) if chunks else {}
        # This must be the last operation that can fail: it overwrites KV that a second attempt would need.
        paths = self._keep_paths(chunks, outputs[first:]) if chunks else {}
        on_host = chosen.cpu().numpy()[:first]
        if decodes.size:
            self.append_decodes(decodes, on_host, outputs[:first] if specs else None, items)
        for chunk in chunks:
            forward, last = chunk.forward, first + chunk.rows
            hidden = forward.output.hidden
            if hidden is not None and hidden.mean and chunk.rows:
                add_means(forward, outputs[first:last], chunk.output_rows)
            self.append(chunk, outputs[last - chunk.output_rows : last], items, paths)
            if forward.draft_tokens and result.hidden is not None:
                own = result.hidden[last - chunk.output_rows : last]
                forward.hidden_rows = (*forward.hidden_rows, *own)
            if forward in scores:
                indexes, found = scores[forward]
                forward.add_scores(indexes, found.logprobs, found.is_argmax)
            forward.draws = draws.get(forward)
            first = last
        return decodes

    def append_decodes(
        self, decodes: Decodes, chosen: NDArray[np.int64], outputs: Sequence[RowOutput] | None, items: int
    ) -> None:
        """Commits the tokens of plain decodes, whose rows are the first ones of the step."""
        columns, started_ns = decodes.columns, decodes.started_ns
        self.kv_table.append_next(decodes.rows, columns[Column.POSITION], columns[Column.TOKEN])
        columns[Column.CHOSEN] = chosen
        # Decodes that were not requested yet have no queueing time: 0.
        arrived = decodes.column(Column.ARRIVED_NS)
        columns[Column.QUEUE_NS] = [started_ns - arrived_ns if arrived_ns else 0 for arrived_ns in arrived]
        columns[Column.COMPUTE_NS] = time.monotonic_ns() - started_ns
        columns[Column.BATCH_ITEMS] = items
        decodes.row_outputs = outputs

    def append(
        self, chunk: Chunk, outputs: Sequence[RowOutput], items: int, paths: dict[Forward, list[int]]
    ) -> None:
        """Commits the tokens of a chunk, and adds its outputs."""
        forward = chunk.forward
        if not forward.parents:
            self.kv_table.append(forward.kv, chunk.token_ids)
        elif chunk.is_last:
            forward.kept_path = paths[forward]
            # The first kept token that was moved to another slot.
            own = next((at for at, index in enumerate(forward.kept_path) if at != index), None)
            self.kv_table.append(forward.kv, [forward.token_ids[i] for i in forward.kept_path], own)
        if self.kv_table.states is not None and chunk.is_last:
            self.kv_table.states.end(forward.sequence)
        forward.computed += chunk.count
        forward.steps += 1
        forward.batch_items = items
        if forward.filling_digest is not None or forward.computed + self.kv.page_size <= len(
            forward.token_ids
        ):
            self.prefix_waits.progressed(forward)
        forward.outputs = (*forward.outputs, *outputs)

    def _keep_paths(self, chunks: Sequence[Chunk], outputs: Sequence[RowOutput]) -> dict[Forward, list[int]]:
        """The kept paths of trees whose last chunk has run. Moves their KV to consecutive slots."""
        paths: dict[Forward, list[int]] = {}
        moves: list[tuple[int, int]] = []
        first = 0
        for chunk in chunks:
            forward, last = chunk.forward, first + chunk.rows
            if forward.parents and chunk.is_last:
                chosen = [output.token_id for output in (*forward.outputs, *outputs[first:last])]
                path = [0]
                if forward.accept is not Accept.ALL:
                    path = kept_path(forward.token_ids, forward.parents, chosen)
                paths[forward] = path
                slot, start = self.kv_table.slot, forward.position
                moves += [
                    (slot(forward.kv, start + index), slot(forward.kv, start + target))
                    for target, index in enumerate(path)
                    if index != target
                ]
            first = last
        if moves:
            self.kv.move_slots(moves)
        return paths

    def draw(self, forward: Forward) -> int:
        """Draws some of the extra samples of a forward whose tokens are all computed.

        Returns their cost; see `draw_extra_samples`. 0: all are drawn.
        """
        if forward.draws is None:
            return 0
        try:
            cost, samples = next(forward.draws, (0, ()))
        except Exception as error:
            raise_if_lost(error)
            raise
        forward.samples = (*forward.samples, *samples)
        return cost

    def complete(self, forward: Forward) -> None:
        """Completes the answer of a forward whose tokens are all computed. Truncates rejected drafts."""
        while forward.draws is not None and self.draw(forward):
            pass
        forward.draws = None
        if forward.parents:
            kept = len(forward.kept_path)
        else:
            kept = len(forward.token_ids) if forward.accept is Accept.ALL else 1 + accepted_drafts(forward)
        if kept < len(forward.token_ids):
            self.kv_table.truncate(forward.kv, forward.position + kept)
        if forward.ephemeral:
            self.kv_table.release(forward.sequence)
        forward.kept = kept
        forward.compute_ns = time.monotonic_ns() - forward.started_ns
        if forward.arrived_ns:
            forward.queue_ns = max(0, forward.started_ns - forward.arrived_ns)
        self.stats.count(forward)

    def roll_back(self, forward: Forward) -> None:
        """Restores the sequence of a forward to its state before it."""
        self.prefix_waits.finished(forward)
        self._restore(forward)

    def undo(self, sequence: int, length: int) -> None:
        """Truncates a sequence to its former length, if it still exists."""
        known = self.kv_table.get(sequence)
        if known is not None and len(known) >= length:
            self.kv_table.truncate(known, length)

    def _restore(self, forward: Forward) -> None:
        if forward.ephemeral or forward.position == 0:
            # Before position 0 the sequence was unknown or empty, which is the same.
            self.kv_table.release(forward.sequence)
        else:
            self.undo(forward.sequence, forward.position)

    def length(self, sequence: int) -> int | None:
        """The length of a sequence in tokens. None if it is not known."""
        known = self.kv_table.get(sequence)
        return None if known is None else len(known)

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of another. Raises KvMissing, and as `KvTable.fork`."""
        self.kv_table.fork(self._sequence(sequence), children)

    def truncate(self, sequence: int, new_len: int) -> None:
        """Truncates a sequence and frees its pages. Raises KvMissing, and as `KvTable.truncate`."""
        self.kv_table.truncate(self._sequence(sequence), new_len)

    def release(self, sequence: int) -> bool:
        """Removes a sequence. False if it was not known."""
        return self.kv_table.release(sequence)

    def release_all(self) -> None:
        for sequence in list(self.kv_table):
            self.kv_table.release(sequence.key)

    def reset_counts(self) -> None:
        """Sets all counts to zero, after the warm-up."""
        self.stats.reset()
        self.kv_table.reset_counts()

    def _sequence(self, sequence: int) -> KvSequence:
        known = self.kv_table.get(sequence)
        if known is None:
            raise KvMissing(f"sequence {sequence} is not known")
        return known
