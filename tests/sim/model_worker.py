"""A model of a worker: token lists instead of KV, and the order of events of `workers/step_loop.py`.

Commands wait in the inbox until `take`; then controls are carried out at once, and forwards queue. `step`
runs some of them, perhaps only a chunk of each; answers wait in the outbox until they are delivered. Whatever
it does wrong, it does as a real one would: pages run out, steps fault, deadlines pass, a copy is forgotten,
and there are tokens of which it dies.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from service.caches.effects import Claim, Command
from service.caches.entries import WorkerView
from service.pool import wire
from tests.sim.toy_model import VOCAB, accepted_path, line_to, next_token, output_of
from workers.common import worker_pb2

FAULT = worker_pb2.WORKER_ERROR_REASON_FAULT
KV_MISSING = worker_pb2.WORKER_ERROR_REASON_KV_MISSING
KV_EXHAUSTED = worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED
TIMEOUT = worker_pb2.WORKER_ERROR_REASON_TIMEOUT
# A token of no vocabulary, which a schedule may have workers die of.
POISON = 255


def message_of(command: Command) -> worker_pb2.WorkerCommand:
    """A command as it arrives."""
    message = worker_pb2.WorkerCommand()
    wire.write_command(command, message)
    return message


def one_by_one(command: worker_pb2.WorkerCommand) -> Iterator[worker_pb2.WorkerCommand]:
    """A command as this worker takes it: plain decodes that were sent together one by one."""
    if not command.HasField("decodes"):
        yield command
    for row in struct.iter_unpack("<9Q", command.decodes.rows):
        op_id, sequence, caller, position, token, prompt_len, flags, timeout_ns, seed = row
        forward = worker_pb2.ForwardCommand(
            sequence=sequence,
            caller=caller,
            position=position,
            token_ids=[token],
            prompt_len=prompt_len,
            options=command.decodes.options[flags // 256],
            prelaunch=flags % 256,
            timeout_ns=timeout_ns,
            default_seed=seed,
            kind=worker_pb2.OPERATION_KIND_DECODE,
        )
        yield worker_pb2.WorkerCommand(op_id=op_id, forward=forward)


def together(events: Iterable[worker_pb2.WorkerEvent], plain: Container[int]) -> list[worker_pb2.WorkerEvent]:
    """Answers as a worker sends them: those to plain decodes that follow each other as one."""
    sent: list[worker_pb2.WorkerEvent] = []
    for is_plain, run in itertools.groupby(events, lambda e: e.op_id in plain and e.HasField("forward")):
        if is_plain:
            rows = [struct.pack("<5Q", e.op_id, e.forward.outputs[0].token_id, 0, 0, 0) for e in run]
            sent.append(worker_pb2.WorkerEvent(decodes=worker_pb2.DecodesDone(rows=b"".join(rows))))
        else:
            sent += run
    return sent


class ProtocolError(Exception):
    """The gateway sent what a worker must never see."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How many pages there are, of how many tokens each."""

    pages: int
    page_tokens: int = 16

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often things go wrong, as probabilities of each occasion."""

    step: float = 0.02
    control: float = 0.02
    timeout: float = 0.15
    # Of a sequence with POISON in it: that the process dies.
    poison: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    op_id: int
    body: worker_pb2.ForwardCommand
    tokens: list[int]
    options: worker_pb2.ForwardOptions
    begun: bool = False
    computed: int = 0

    @property
    def end(self) -> int:
        """The sequence's length with all tokens."""
        return self.body.position + len(self.tokens)


class ModelWorker:
    """One incarnation. The simulator calls `take`, `step` and `deliver` in any order, any number of times."""

    def __init__(
        self, worker_id: str, epoch: int, pool: Pool, rng: random.Random, seen: Counter[str]
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        # Which it has loaded: what it says depends on them.
        self.weights = 0
        self.pool = pool
        self.faults = Faults()
        # A crashed worker does nothing more; what it had sent may still arrive.
        self.crashed = False
        # The forward of which it died.
        self.killed_by = 0
        self.inbox: deque[worker_pb2.WorkerCommand] = deque()
        self.outbox: deque[worker_pb2.WorkerEvent] = deque()
        self.sequences: dict[int, list[int]] = {}
        # With which adapter the KV of each was computed.
        self.adapters: dict[int, int] = {}
        # What is true of what each forward must find, by op id. Filled by the simulator.
        self.expected: dict[int, Sequence[int]] = {}
        # Op ids of decodes of which only the next token was asked: see `together`.
        self.plain: set[int] = set()
        # Op ids that met a copy that was forgotten.
        self.excused: set[int] = set()
        # Longer than they should be, since a truncation of them failed.
        self.untrimmed: set[int] = set()
        self._forgotten: set[int] = set()
        self._jobs: dict[int, _Job] = {}
        self._capacity_tokens = 0
        self.rng = self._rng = rng
        self._seen = seen

    @property
    def idle(self) -> bool:
        """Nothing to take, run or deliver."""
        return not (self.inbox or self._jobs or self.outbox)

    @property
    def queued(self) -> list[int]:
        """The op ids of the forwards that it has and has not answered."""
        return list(self._jobs)

    @property
    def has_jobs(self) -> bool:
        """Whether forwards are queued."""
        return bool(self._jobs)

    @property
    def pages_left(self) -> int:
        """Pages that nobody holds, be it for what is to come. None are shared here: they may be overdrawn."""
        reserved = {job.body.sequence: job.end for job in self._jobs.values() if job.begun}
        held = sum(
            self.pool.pages_for(max(len(tokens), reserved.get(number, 0)))
            for number, tokens in self.sequences.items()
        )
        return max(0, self.pool.pages - held)

    def view(self, capacity_tokens: int) -> WorkerView:
        """As what the gateway knows it. `capacity_tokens`: of its longest sequence."""
        self._capacity_tokens = capacity_tokens
        return WorkerView(
            self.worker_id,
            self.epoch,
            page_tokens=self.pool.page_tokens,
            pages_total=self.pool.pages,
            capacity_tokens=min(capacity_tokens, self.pool.pages * self.pool.page_tokens),
            pages_available=self.pages_left,
            weights=self.weights,
        )

    def work(self) -> None:
        """Takes all that was sent, and runs a step of all of it."""
        self.take(len(self.inbox))
        self.step(all_jobs=True)

    def take(self, count: int) -> None:
        """Takes commands off the stream."""
        for _ in range(min(count, len(self.inbox))):
            command = self.inbox.popleft()
            kind = command.WhichOneof("command")
            if kind == "forward":
                self._queue(command.op_id, command.forward)
            elif kind == "abort":
                self._abort(command.abort.target_op_id)
            else:
                self._control(command)

    def step(self, *, all_jobs: bool = False) -> None:
        """One step over some of the queued forwards: they begin, then they run."""
        op_ids = list(self._jobs)
        if not all_jobs:
            op_ids = self._rng.sample(op_ids, self._rng.randint(0, len(op_ids)))
        for op_id in [op_id for op_id in op_ids if self.begin(op_id)]:
            if self._is_deadly(op_id):
                self.crashed, self.killed_by = True, op_id
                self._seen["poisoned"] += 1
                return
            if self._rng.random() < self.faults.step:
                self.fail(op_id)
            else:
                self.run(op_id)

    def begin(self, op_id: int) -> bool:
        """Reserves a queued forward's pages, if it has not begun. Returns False if it ends here."""
        job = self._jobs[op_id]
        if not job.begun:
            if job.body.timeout_ns and self._rng.random() < self.faults.timeout:
                # Dropped before its start: there is nothing to roll back.
                del self._jobs[op_id]
                self.refuse(op_id, TIMEOUT)
            else:
                self._begin(job)
        return job.begun

    def run(self, op_id: int, until: int | None = None) -> None:
        """Computes a forward that has begun up to this many of its tokens; None: some or all of them."""
        job = self._jobs[op_id]
        tokens = self.sequences[job.body.sequence]
        count = len(job.tokens)
        if until is None:
            until = count if self._rng.random() < 0.7 else self._rng.randint(job.computed + 1, count)
        if not job.options.parents:
            tokens.extend(job.tokens[job.computed : until])
        job.computed = until
        if until == count:
            self._complete(job)

    def fail(self, op_id: int) -> None:
        """A step with this forward in it fails."""
        self._end(self._jobs[op_id], FAULT)

    def has_forgotten(self, number: int) -> bool:
        """Whether it lost a copy that it should have."""
        return number in self._forgotten

    def forget(self) -> None:
        """Loses a copy that no running forward is about, as an eviction or a bug would."""
        busy = {job.body.sequence for job in self._jobs.values()}
        candidates = [number for number in self.sequences if number not in busy]
        if candidates:
            number = self._rng.choice(candidates)
            del self.sequences[number]
            self._forgotten.add(number)

    # A gateway that comes after the one it had.

    def holdings(self) -> dict[int, int]:
        """Nothing of what was asked before is gone on with, or answered. How long its sequences are."""
        self._drop_jobs()
        self.inbox.clear()
        self.outbox.clear()
        return {number: len(tokens) for number, tokens in self.sequences.items()}

    def _drop_jobs(self) -> None:
        for job in list(self._jobs.values()):
            if job.begun:
                self._roll_back(job)
        self._jobs.clear()
        self.expected.clear()

    def replace_weights(self, weights: int, *, keep_sequences: bool) -> None:
        """Has other weights in place, and goes on with nothing that it was asked."""
        if keep_sequences:
            # What has arrived are controls, which it carries out, and forwards that it then drops.
            self.take(len(self.inbox))
            self._drop_jobs()
        else:
            self.holdings()
            self.sequences.clear()
            self.untrimmed.clear()
        self.weights = weights

    def adopt(self, claims: Iterable[Claim]) -> dict[int, int]:
        """Cuts its sequences to what is claimed, and drops all others and those of other tokens."""
        claimed = {claim.number: claim for claim in claims}
        for number, tokens in list(self.sequences.items()):
            claim = claimed.get(number)
            if claim is not None:
                self._seen["adopted longer" if len(tokens) > claim.length else "adopted as it is"] += 1
                del tokens[claim.length :]
            if claim is None or not self.is_claimed(tokens, claim):
                self._seen["not adopted" if claim is None else "adopted not: other tokens"] += 1
                del self.sequences[number]
        self._forgotten.clear()
        self.untrimmed.clear()
        return {number: len(tokens) for number, tokens in self.sequences.items()}

    def is_claimed(self, tokens: Sequence[int], claim: Claim) -> bool:
        """Whether these are the tokens that the gateway means."""
        packed = array("I", tokens).tobytes()
        return hashlib.blake2b(packed, digest_size=16).digest() == claim.digest

    def _is_deadly(self, op_id: int) -> bool:
        if not self.faults.poison:
            return False
        job = self._jobs[op_id]
        is_poison = POISON in job.tokens or POISON in self.sequences[job.body.sequence]
        return is_poison and self._rng.random() < self.faults.poison

    def _queue(self, op_id: int, body: worker_pb2.ForwardCommand) -> None:
        self._check_not_queued(body.sequence, "a forward")
        options = worker_pb2.ForwardOptions.FromString(body.options)
        self._jobs[op_id] = _Job(op_id, body, list(body.token_ids), options)

    def _check_not_queued(self, number: int, what: str) -> None:
        # The step loop carries controls out at once: it would overtake the forward.
        if any(job.body.sequence == number for job in self._jobs.values()):
            raise ProtocolError(f"{what} for sequence {number}, which has a queued forward")

    def _abort(self, op_id: int) -> None:
        job = self._jobs.pop(op_id, None)
        if job is None:
            self._seen["abort came too late"] += 1
            return
        self._seen["abort of a begun forward" if job.begun else "abort of a queued forward"] += 1
        if job.begun:
            self._roll_back(job)

    def _control(self, command: worker_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "release":
            for number in command.release.sequences:
                self._check_not_queued(number, "a release")
                self.sequences.pop(number, None)
        elif kind == "fork":
            tokens = self._source(command.op_id, command.fork.sequence)
            if tokens is None:
                # A forward on a copy that could not be made has its excuse. The gateway takes the source's KV
                # for missing, too, and does not cut it before its next use.
                self._forgotten.update(command.fork.children)
                self.untrimmed.add(command.fork.sequence)
                return
            for child in command.fork.children:
                if child in self.sequences:
                    raise ProtocolError(f"fork into sequence {child}, which exists")
                self.sequences[child] = list(tokens)
                self.adapters[child] = self.adapters.get(command.fork.sequence, 0)
            if command.fork.sequence in self.untrimmed:
                self.untrimmed.update(command.fork.children)
        else:
            tokens = self._source(command.op_id, command.truncate.sequence)
            if tokens is None:
                self.untrimmed.add(command.truncate.sequence)
                return
            if command.truncate.new_len > len(tokens):
                self.refuse(command.op_id, FAULT)
                return
            del tokens[command.truncate.new_len :]
        self.outbox.append(worker_pb2.WorkerEvent(op_id=command.op_id, done=worker_pb2.ControlDone()))

    def _source(self, op_id: int, number: int) -> list[int] | None:
        """The sequence that a control is about; None if that has failed."""
        self._check_not_queued(number, "a control")
        if self._rng.random() < self.faults.control:
            self.refuse(op_id, FAULT)
            return None
        tokens = self.sequences.get(number)
        if tokens is None:
            # Such as of one whose first forward was aborted: there is nothing to cut.
            self.excused.add(op_id)
            self.miss(op_id, number)
        return tokens

    def _begin(self, job: _Job) -> None:
        body = job.body
        tokens = self.sequences.get(body.sequence)
        if tokens is None and body.position == 0:
            tokens = self.sequences[body.sequence] = []
        if tokens is None or len(tokens) < body.position:
            del self._jobs[job.op_id]
            self.miss(job.op_id, body.sequence)
            return
        if len(tokens) > body.position:
            self._seen["a longer copy was cut"] += 1
            del tokens[body.position :]
        if not tokens:
            self.adapters[body.sequence] = body.adapter
        if self.adapters.get(body.sequence, 0) != body.adapter:
            raise ProtocolError(f"op {job.op_id}: of adapter {body.adapter}, and its KV is of another one")
        expected = self.expected.pop(job.op_id, None)
        if expected is not None and list(expected) != tokens:
            raise ProtocolError(f"op {job.op_id}: the copy holds {tokens}, in truth {list(expected)}")
        needed = self.pool.pages_for(job.end) - self.pool.pages_for(len(tokens))
        available = self.pages_left
        if needed > available:
            if body.ephemeral:
                # A copy is released now, and takes the pages that it has here again the next time.
                needed = self.pool.pages_for(job.end)
            self._end(job, KV_EXHAUSTED, pages_needed=needed, pages_available=available)
        else:
            job.begun = True

    def _complete(self, job: _Job) -> None:
        body, options, tokens = job.body, job.options, self.sequences[job.body.sequence]
        output, salt = options.output, None
        if output.HasField("sampling"):
            own = output.sampling.HasField("seed")
            salt = (output.sampling.seed if own else body.default_seed, body.prompt_len)
        before, parents = tokens[: body.position], list(options.parents)
        lines = (line_to(job.tokens, parents, index) for index in range(len(job.tokens)))
        chosen = [next_token(before + line, salt, self.weights, body.adapter) for line in lines]
        path = list(range(1 if parents else len(job.tokens)))
        if options.accept and not body.keep_all:
            path = accepted_path(job.tokens, parents, chosen)
        tokens[:] = [*before, *(job.tokens[index] for index in path)]
        appended: list[int] = []
        while len(appended) + 1 < body.prelaunch and self._goes_on(body, options, tokens):
            appended.append(chosen[-1])
            tokens.append(chosen[-1])
            chosen.append(next_token(tokens, salt, self.weights, body.adapter))
        self._seen["several tokens at once"] += bool(appended)
        if body.ephemeral:
            del self.sequences[body.sequence]
        del self._jobs[job.op_id]
        kept = len(path) + len(appended)
        done = worker_pb2.ForwardDone(kept=kept, kept_path=path if parents else (), appended=appended)
        if options.draft_tokens:
            done.draft_token_ids.extend(self._drafts([*tokens, chosen[path[-1]]], salt, options.draft_tokens))
        for token in chosen[len(chosen) - options.rows - len(appended) :]:
            done.outputs.append(output_of(token, output))
        self.outbox.append(worker_pb2.WorkerEvent(op_id=job.op_id, forward=done))
        # Another gateway may have used the number for something else.
        self.plain.discard(job.op_id)
        wants_more = (
            body.ephemeral or body.adapter or body.keep_all or output.ListFields() or options.draft_tokens
        )
        is_decode = body.kind == worker_pb2.OPERATION_KIND_DECODE and len(body.token_ids) == 1
        if is_decode and options.rows == 1 and not wants_more and not appended:
            self.plain.add(job.op_id)

    def _drafts(self, tokens: list[int], salt: tuple[int, int] | None, most: int) -> list[int]:
        """What a draft model expects behind these: as many as it likes, and sometimes wrong."""
        drafts: list[int] = []
        for _ in range(self._rng.randint(0, most)):
            right = self._rng.random() < 0.8
            drafts.append(next_token(tokens + drafts, salt) if right else self._rng.randrange(VOCAB))
        return drafts

    def _goes_on(
        self, body: worker_pb2.ForwardCommand, options: worker_pb2.ForwardOptions, tokens: Sequence[int]
    ) -> bool:
        """Whether it has computed the next token before that was asked for, too."""
        length = len(tokens)
        has_room = length < self._capacity_tokens and (length % self.pool.page_tokens or self.pages_left)
        is_plain = options.rows == 1 and not (body.ephemeral or options.output.logits)
        return bool(has_room and is_plain and zlib.crc32(bytes(tokens)) % 5)

    def _end(self, job: _Job, reason: int, **pages: int) -> None:
        del self._jobs[job.op_id]
        self._roll_back(job)
        self.refuse(job.op_id, reason, **pages)

    def _roll_back(self, job: _Job) -> None:
        """As the engine's: nothing is left of what began at position 0."""
        number, position = job.body.sequence, job.body.position
        if job.body.ephemeral or position == 0:
            self.sequences.pop(number, None)
        elif number in self.sequences:
            del self.sequences[number][position:]

    def miss(self, op_id: int, number: int) -> None:
        if number in self._forgotten:
            self.excused.add(op_id)
        self.refuse(op_id, KV_MISSING)

    def refuse(self, op_id: int, reason: int, **pages: int) -> None:
        self._seen[f"worker error {reason}"] += 1
        error = worker_pb2.WorkerError(reason=reason, **pages)  # type: ignore[arg-type]
        self.outbox.append(worker_pb2.WorkerEvent(op_id=op_id, error=error))
