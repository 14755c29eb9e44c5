"""Forwards that are computed before they are requested.

A caller that generates text appends in each step the token that the last step chose. That request takes some
milliseconds: the result goes to the gateway, becomes durable there, and goes to the caller, whose next append
then comes back. If a forward says that it will be continued in this way (`prelaunch`), the next forward is
queued at once as a *prelaunched* forward. When its request arrives, it consumes the result. So there is no
pause between two steps, and the round trip overlaps with the computation.

`prelaunch` says how many forwards will follow. If a step is shorter than the round trip, they are prelaunched
one after another. A request is answered with all results that are ready, as far as it allows, and appends
their tokens. So answers become longer until the round trip is hidden. This is done only while all sequences
of a step do so: beside others it would take more steps for the same number of tokens. While steps are far
shorter than a round trip, a request is *held* for a moment, so that its answer has several tokens: handling
messages takes time from the steps.

Callers with a loop of their own do not set `prelaunch`. After several such appends in a row the next one is
prelaunched, too, if that is enabled. On a CPU it would be slower: steps compete with the senders of requests.

A prelaunched forward is queued or running, then ready, then consumed or dropped. A sequence has at most one
that is queued or running, behind those that are ready. A request for a running one takes it over, and is
answered with its step (`consume_running`). Nothing of it is sent before it is requested, so no client sees a
token that the journal does not have. Any other command for its sequence first drops it, and then has the same
effect as if it had not existed.

All prelaunched forwards are plain decodes (`decodes`), which are queued and consumed as columns. Callers that
request more, such as logits, choose the next token themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from workers import prelaunched_results
from workers.adapters.table import AdapterTable
from workers.decodes import NEVER, NO_DECODES, Column, Decodes, Mask
from workers.executors.engine import Engine
from workers.operations import Accept, Forward, Kind
from workers.outputs import OutputSpec
from workers.prelaunched_results import ReadyResults
from workers.scheduler import Scheduler

# A result that is not requested within this time is dropped. Until then its sequence has an extra token.
HOLD_TIMEOUT_S = 1.0
# After so many appends of the chosen token in a row, the next one is prelaunched without `prelaunch`.
_REPEATS_BEFORE_PRELAUNCH = 3

# How long a request is held. Requests are not held if steps take longer than _LONGEST_STEP_NS.
_HOLD_REQUEST_NS = 4_000_000
_LONGEST_STEP_NS = _HOLD_REQUEST_NS // 2

# What a request must have to consume a result: position, token, output and prompt_len.
_Expected = tuple[int, int, OutputSpec, int]


class Prelauncher:
    """Owner of the prelaunched forwards. Queued ones are in the scheduler, and count for their callers."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        adapters: AdapterTable[Any] | None,
        max_seq_tokens: int,
        *,
        prelaunch_unrequested: bool,
    ) -> None:
        """`max_seq_tokens`: no longer sequence is prelaunched; the gateway checks requested forwards.

        `prelaunch_unrequested`: also prelaunch for callers that do not set `prelaunch`, after enough repeats.
        """
        self._engine = engine
        self._scheduler = scheduler
        self._adapters = adapters
        self._max_seq_tokens = max_seq_tokens
        self.prelaunch_unrequested = prelaunch_unrequested
        self._next_id = -1
        # All of these by sequence. What the next request has to be, and how many requests in a row were so.
        self.expected: dict[int, _Expected] = {}
        self._repeats: dict[int, int] = {}
        # The last position that may be prelaunched before another request arrives.
        self._last: dict[int, int] = {}
        # The op id of the prelaunched forward that is queued or running and was not requested yet.
        self.queued: dict[int, int] = {}
        # The results.
        self.ready: ReadyResults = {}
        # Held requests, and until when.
        self.held: dict[int, tuple[Decodes, int]] = {}
        # How long the last prelaunched step took.
        self._step_ns = _HOLD_REQUEST_NS
        # A prelaunched forward that has begun in this step, and so holds pages.
        self._begun: Forward | None = None
        # Whether no prelaunched forward may begin in this step, or in the next one, since a requested forward
        # needs the pages.
        self._is_paused = self.has_to_wait = False

    def may_follow(self, *, wanted: bool) -> bool:
        """Whether `follow` may have an effect. `wanted`: whether one of its decodes has set `prelaunch`."""
        return wanted or self.prelaunch_unrequested or bool(self.expected)

    def follow(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> Collection[int]:
        """Queue the decodes that are expected after `decodes` were answered.

        `launched`: those of `next_decodes`, if they run already.

        Returns the sequences for which none is queued: nothing is expected, there is no room, or their
        adapter has no slot now.
        """
        sequences = decodes.sequences
        self._forget_expected(sequences)
        if any(decodes.columns[Column.ADAPTER].tolist()):
            assert self._adapters is not None, "others were refused"
            decodes = decodes.take(self._adapters.assign_slots(decodes))
        # After an end token nothing is queued, but a decode that runs already may still be requested.
        following, is_expected = self._following(decodes), self._followed(decodes)
        is_followed = is_expected & ~_ends(decodes)
        if self.prelaunch_unrequested:
            # Expect a request of every sequence, to learn whether its caller appends the chosen token.
            is_expected = decodes.columns[Column.POSITION] + 1 < self._max_seq_tokens
        self._expect(following.take(is_expected))
        for sequence in decodes.take(~is_expected).sequences if self._repeats else ():
            self._repeats.pop(sequence, None)
        # After an end token nothing more is computed.
        self._set_last(decodes.take(is_expected & ~_ends(decodes)))
        if launched.size:
            self.queued.update(zip(launched.sequences, launched.column(Column.OP_ID), strict=True))
        else:
            self._queue(following.take(is_followed))
        return [sequence for sequence in sequences if sequence not in self.queued]

    def _set_last(self, decodes: Decodes) -> None:
        last = decodes.columns[Column.POSITION] + decodes.columns[Column.PRELAUNCH]
        self._last.update(zip(decodes.sequences, last.tolist(), strict=True))

    def _queue(self, decodes: Decodes) -> None:
        """Queue as many decodes as the next step has room for.

        Requests for the others would arrive before they run, and their callers would be charged for both.
        """
        room = max(0, self._scheduler.max_batch_items - len(self._scheduler))
        queued = decodes.take(np.arange(decodes.size) < room)
        if queued.size and not self._scheduler.add_decodes(queued):
            for forward in queued.forwards():
                self._scheduler.add(forward)
        self.queued.update(zip(queued.sequences, queued.column(Column.OP_ID), strict=True))

    def next_decodes(self, decodes: Decodes) -> Decodes:
        """The decodes to prelaunch after running, requested decodes. Their tokens are not known yet."""
        return self._following(decodes).take(self._followed(decodes))

    def _followed(self, decodes: Decodes) -> Mask:
        """[N] bool, after which decodes to prelaunch: where the caller wants it, or after enough repeats."""
        wanted = decodes.columns[Column.PRELAUNCH] != 0
        if self.prelaunch_unrequested:
            repeats = [self._repeats.get(sequence, 0) for sequence in decodes.sequences]
            wanted |= np.array(repeats) >= _REPEATS_BEFORE_PRELAUNCH
        followed: Mask = wanted & (decodes.columns[Column.POSITION] + 1 < self._max_seq_tokens)
        return followed

    def consume_running(self, running: Decodes, requests: Decodes) -> bool:
        """Let requests take over prelaunched decodes that are running.

        False, without an effect, unless all requests are for running decodes, and as expected.
        """
        sequences = requests.sequences
        if list(map(self.expected.get, sequences)) != list(_requests(requests)):
            return False
        places = dict(zip(running.sequences, range(running.size), strict=True))
        # A sequence with ready results: the request is for these, not for the running decode.
        awaited = [each for each in sequences if each in self.queued and each not in self.ready]
        at = [places.get(sequence, -1) for sequence in awaited]
        if len(at) < requests.size or -1 in at or len(set(at)) < len(at):
            return False
        columns = requests.columns.copy()
        columns[Column.ARRIVED_NS], columns[Column.ARRIVAL] = 0, running.columns[Column.ARRIVAL, at]
        running.columns[:, at] = columns
        for sequence in sequences:
            del self.queued[sequence]
        if self.prelaunch_unrequested:
            self._count_repeats(sequences)
        return True

    def _count_repeats(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._repeats[sequence] = self._repeats.get(sequence, 0) + 1

    def _following(self, decodes: Decodes) -> Decodes:
        """The next decodes of these sequences, with the chosen tokens if they are known."""
        columns = decodes.columns.copy()
        columns[Column.OP_ID] = self._new_ids(decodes.size)
        columns[Column.POSITION] += 1
        columns[Column.TOKEN] = columns[Column.CHOSEN]
        columns[Column.PRELAUNCH] = columns[Column.ARRIVED_NS] = 0
        columns[Column.DEADLINE] = NEVER
        return Decodes(columns, decodes.outputs)

    def _new_ids(self, count: int) -> Sequence[int]:
        first, self._next_id = self._next_id, self._next_id - count
        return range(first, self._next_id, -1)

    def _expect(self, decodes: Decodes) -> None:
        self.expected.update(zip(decodes.sequences, _requests(decodes), strict=True))

    def _forget_expected(self, sequences: Sequence[int]) -> None:
        """Expect nothing of sequences that were answered without using what was prelaunched for them."""
        for sequence in sequences if self.expected else ():
            self.expected.pop(sequence, None)
            self._last.pop(sequence, None)
        if self.queued or self.ready:
            # What is prelaunched continues an earlier state of the sequence.
            self._cancel(sequences)

    def next_step(self) -> None:
        """Note that a step begins."""
        self._begun = None
        self._is_paused, self.has_to_wait = self.has_to_wait, False

    def all_requested(self) -> None:
        """Note that all running decodes were requested: nobody waits for their pages."""
        self._begun = None

    def may_begin(self, prelaunched: Forward) -> bool:
        """Whether a prelaunched forward may take pages now. If so, it counts as begun."""
        if not self._is_paused:
            self._begun = prelaunched
        return not self._is_paused

    def begin(self, decodes: Decodes) -> Mask:
        """As `Engine.begin_decodes`, but no prelaunched decode begins while these may not take pages."""
        prelaunched = decodes.prelaunched
        allowed = ~prelaunched if self._is_paused else np.ones(decodes.size, np.bool_)
        begun = self._engine.begin_decodes(decodes, allowed)
        which = (begun & prelaunched).nonzero()[0]
        if len(which):
            self._begun = decodes.forward(int(which[0]))
        return begun

    def mark_ready(self, decodes: Decodes, *, go_on: bool) -> None:
        """Keep the results of prelaunched decodes. `go_on`: prelaunch the next ones."""
        for sequence in decodes.sequences:
            del self.queued[sequence]
        prelaunched_results.keep(self.ready, decodes)
        self._step_ns = max(decodes.column(Column.COMPUTE_NS), default=self._step_ns)
        if go_on:
            last = np.array([self._last.get(sequence, 0) for sequence in decodes.sequences])
            may_follow = (decodes.columns[Column.POSITION] < last) & (decodes.columns[Column.ADAPTER] == 0)
            may_follow &= (decodes.columns[Column.POSITION] + 1 < self._max_seq_tokens) & ~_ends(decodes)
            self._queue(self._following(decodes.take(may_follow)) if any(may_follow) else NO_DECODES)

    def forget(self, prelaunched: Forward) -> None:
        """Forget a prelaunched forward that has left the scheduler and holds nothing."""
        del self.queued[prelaunched.sequence]

    def are_ready(self, requests: Decodes) -> Mask:
        """[N] bool, which requests are as expected and have their results ready."""
        sequences = requests.sequences
        known = map(self.expected.get, sequences)
        found = [
            sequence in self.ready and one == request
            for sequence, one, request in zip(sequences, known, _requests(requests), strict=True)
        ]
        return np.array(found, np.bool_)

    def hold(self, decodes: Decodes, now_ns: int) -> Decodes:
        """Hold requests for which more results are about to be ready. Returns the others."""
        if self._step_ns > _LONGEST_STEP_NS or not (self.queued and decodes.size):
            return decodes
        zipped = zip(decodes.sequences, _requests(decodes), decodes.column(Column.PRELAUNCH), strict=True)
        is_held = [
            sequence in self.queued
            and self.expected.get(sequence) == request
            and prelaunch > max(1, len(self.ready.get(sequence, ())))
            for sequence, request, prelaunch in zipped
        ]
        for index, sequence in enumerate(decodes.sequences):
            if is_held[index]:
                self.held[sequence] = decodes.select(np.array([index])), now_ns + _HOLD_REQUEST_NS
        return decodes.take(~np.array(is_held, np.bool_))

    def release_held(self, now_ns: int | None = None) -> Decodes:
        """Stop holding the requests that are due at `now_ns` (None: all), and return them."""
        if not self.held:
            return NO_DECODES
        released = [
            sequence
            for sequence, (request, until_ns) in self.held.items()
            if now_ns is None
            or now_ns >= until_ns
            or sequence not in self.queued
            or len(self.ready.get(sequence, ())) >= request.columns[Column.PRELAUNCH, 0]
        ]
        if not released:
            return NO_DECODES
        return Decodes.joined([self.held.pop(sequence)[0] for sequence in released])

    def consume(self, decodes: Decodes) -> tuple[Sequence[Decodes | Forward], Decodes, Decodes]:
        """Answer requests whose results are ready. Drops what was prelaunched for the others.

        Returns:
            The answers.
            For the answered sequences that have nothing else prelaunched: the last decode of each answer.
            The requests without a result.
        """
        sequences, requests = decodes.sequences, list(_requests(decodes))
        known = list(map(self.expected.get, sequences))
        if self.prelaunch_unrequested:
            zipped = zip(sequences, known, requests, strict=True)
            self._count_repeats([sequence for sequence, one, request in zipped if one == request])
        if known != requests:
            zipped = zip(sequences, known, requests, strict=True)
            self.drop([sequence for sequence, one, request in zipped if one and one != request])
        # What is still prelaunched is as requested.
        ready = [sequence in self.ready for sequence in sequences]
        if not all(ready):
            self._cancel([each for each, is_ready in zip(sequences, ready, strict=True) if not is_ready])
            if not any(ready):
                return (), NO_DECODES, decodes
        found = np.array(ready, np.bool_)
        answers, last = prelaunched_results.answer(self.ready, decodes.take(found))
        self._engine.stats.count_decodes(last.columns[Column.COMPUTE_NS].tolist())
        return answers, self._still_to_follow(last), decodes.take(~found)

    def _still_to_follow(self, answered: Decodes) -> Decodes:
        """The decodes after which nothing is prelaunched. Expects a request after each of the others."""
        sequences = answered.sequences
        has_next = np.array([each in self.queued or each in self.ready for each in sequences], np.bool_)
        if not any(has_next):
            return answered
        going_on = answered.take(has_next)
        self._expect(self._following(going_on))
        self._set_last(going_on)
        return answered.take(~has_next)

    def drop(self, sequences: Iterable[int]) -> None:
        """Undo what was prelaunched for these sequences, and expect no requests of them."""
        sequences = list(sequences)
        for sequence in sequences:
            self.expected.pop(sequence, None)
            self._repeats.pop(sequence, None)
            self._last.pop(sequence, None)
        self._cancel(sequences)

    def drop_all(self) -> None:
        """As `drop`, for all sequences."""
        self.drop(self.expected)

    def free_pages(self) -> bool:
        """Drop ready results, to free their pages. Returns whether there were any.

        Sequences with a queued forward keep their results, since the scheduler may be choosing a step with
        it. If no prelaunched forward may begin in this step, all results are dropped.
        """
        freed = [sequence for sequence in self.ready if self._is_paused or sequence not in self.queued]
        for sequence in freed:
            self._engine.undo(sequence, self.ready.pop(sequence)[0].position)
        return bool(freed)

    def wait_for_pages(self, op: Forward) -> bool:
        """Let a forward wait for pages that prelaunched forwards of this step hold. False: they hold none.

        In the next step, no prelaunched forward can take pages before it.
        """
        if self._begun is None:
            return False
        self.has_to_wait = True
        op.waits_for, op.waits_until = self._begun, 1
        return True

    def drop_expired(self, now_ns: int) -> None:
        """Drop results that were not requested in time."""
        timeout_ns = int(HOLD_TIMEOUT_S * 1e9)
        for sequence, results in list(self.ready.items()):
            # A forward that is queued behind the results may be running.
            if now_ns - results[0].since_ns >= timeout_ns and sequence not in self.queued:
                self.drop([sequence])

    def _cancel(self, sequences: Sequence[int]) -> None:
        """Undo what was prelaunched for these sequences."""
        queued: list[int] = []
        for sequence in sequences if self.ready or self.queued else ():
            results = self.ready.pop(sequence, None)
            if results:
                self._engine.undo(sequence, results[0].position)
            op_id = self.queued.pop(sequence, None)
            if op_id is not None:
                queued.append(op_id)
        for forward in self._scheduler.remove_all(queued) if queued else ():
            self._engine.roll_back(forward)


def _requests(decodes: Decodes) -> Iterable[_Expected]:
    """What a request for each of these has to be."""
    column = decodes.column
    return zip(
        column(Column.POSITION), column(Column.TOKEN), decodes.outputs, column(Column.PROMPT_LEN), strict=True
    )


def _ends(decodes: Decodes) -> Mask:
    """[N] bool, which decodes have chosen an end token, after which nothing is prelaunched."""
    if not any(spec.end_token_ids for spec in decodes.distinct_outputs):
        return np.zeros(decodes.size, np.bool_)
    chosen = decodes.column(Column.CHOSEN)
    found = [token in spec.end_token_ids for token, spec in zip(chosen, decodes.outputs, strict=True)]
    return np.array(found, np.bool_)


def may_be_continued(op: Forward) -> bool:
    """Whether the caller of a forward may append the chosen token next.

    Not if it requests logits or hidden states: such callers choose tokens themselves, and the rows are large.
    """
    return (
        op.output.is_plain
        and op.kind in (Kind.PREFILL, Kind.DECODE)
        and op.wanted_rows == 1
        and op.accept is Accept.ALL
        and not op.ephemeral
        and not op.choices
        and not op.sample_seeds
        and not op.draft_tokens
    )
