"""The step loop over a runner of graphs: any mix of callers gives each text the tokens and bits it has alone.

Texts are plain, drawn, cut, masked, biased and penalised; they begin, end and are cancelled at any time, and
some prompts take several steps. Launches are repeated in place of graphs, at once or late. What is compared
with computes one text after the other, without graphs, and prelaunches nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.commands import Abort, Command, Release
from tests.gpu.sizes import ForwardsFirst
from tests.workers import stepping, test_adjusted_rows
from tests.workers.test_adjusted_rows import KINDS, PAGES
from workers.decodes import NO_DECODES, Decodes
from workers.executors import launched_steps
from workers.executors.engine import Engine
from workers.executors.launched_steps import StepInFlight
from workers.kv.table import KvTable
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.operations import Chunk, Forward, Kind
from workers.outputs import OutputSpec, TokenMask
from workers.runners.base import Runner, StepResult
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.sampling import SamplingRow

decoder = test_adjusted_rows.decoder
_silent_numpy = test_adjusted_rows._silent_numpy

from tests.kernels.cuda.test_decode_runner import (  # noqa: E402 - as there
    VOCAB,
    LateEvent,
    LateQueue,
    make_kv,
)

LIMITS = (64, 8, 8)
MAX_TOKENS = 120
# Those whose next choice the host can tell before it knows the token before.
LAUNCHED = (0, 1, 2, 6, 7, 8)


class WorkingQueue(LateQueue):
    """Does a piece of its work when it is asked whether that is done."""

    def event(self) -> LateEvent:
        return WorkingEvent(self)


class WorkingEvent(LateEvent):
    def query(self) -> bool:
        queue = self._queue
        if queue.done < self._place:
            with torch.inference_mode():
                queue.launched[queue.done]()
            queue.done += 1
        return super().query()


class BehindTheQueue(EagerRunner):
    """Runs behind what was launched, as a stream does."""

    queue: LateQueue | None = None
    steps = 0

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        self.steps += 1
        if self.queue is not None:
            event = self.queue.event()
            event.record()
            event.synchronize()
        return super().step(inputs, rows, capture)


@dataclasses.dataclass(frozen=True)
class Text:
    """What a caller wants. `end`: how many tokens its text has then; it may be cancelled before."""

    sequence: int
    kind: int
    prompt: tuple[int, ...]
    end: int
    is_told: bool

    def output(self, position: int) -> OutputSpec:
        """How the token at a position is chosen, and what is returned of it."""
        sampling, is_masked = KINDS[self.kind]
        dice = random.Random(1000 * self.sequence + position)
        mask = TokenMask(allowed=sorted(dice.sample(range(VOCAB), 30))) if is_masked else None
        return OutputSpec(sampling=sampling, mask=mask, logprob=self.sequence % 3 == 0)

    def command(self, op_id: int, tokens: Sequence[int]) -> Forward:
        """The next one of a text with these tokens."""
        is_begun, count = len(tokens) > len(self.prompt), len(self.prompt)
        return Forward(
            op_id,
            self.sequence,
            len(tokens) - 1 if is_begun else 0,
            [tokens[-1]] if is_begun else self.prompt,
            output=self.output(len(tokens)),
            kind=Kind.DECODE if is_begun else Kind.PREFILL,
            caller=self.sequence % 3,
            prompt_len=count,
            prelaunch=self.is_told,
        )


def worker_of(runner: Runner, *, ahead: bool) -> stepping.Worker:
    engine = Engine(KvTable(PAGES, 16), make_kv("cpu"), runner)
    return stepping.Worker(engine, limits=LIMITS, max_seq_tokens=MAX_TOKENS if ahead else 0)


Rows = list[tuple[int, float | None]]


def row_of(done: Forward) -> tuple[int, float | None]:
    return done.outputs[-1].token_id, done.outputs[-1].logprob


def alone(worker: stepping.Worker, text: Text, count: int) -> Rows:
    """The first `count` tokens of a text, computed one after the other."""
    rows: Rows = []
    for _ in range(count):
        asked = text.command(1, [*text.prompt, *(token for token, _ in rows)])
        done = worker.answers(asked)[1]
        assert isinstance(done, Forward), done
        rows.append(row_of(done))
    worker.answers(Release(1, [text.sequence]))
    return rows


class Callers:
    """Texts that begin and end. A text goes on when its last token is answered."""

    def __init__(self, worker: stepping.Worker, dice: random.Random, kinds: Sequence[int]) -> None:
        self._worker, self._dice, self._kinds = worker, dice, kinds
        self._op_ids = self._sequences = 0
        self.rows: dict[Text, Rows] = {}
        self._asked: dict[int, Text] = {}

    def run(self, rounds: int) -> None:
        waiting: list[Text] = []
        for _ in range(rounds):
            # Some callers are slow.
            slow = [text for text in waiting if self._dice.random() < 0.25]
            steady = [text for text in waiting if text not in slow]
            commands: list[Command] = [*self._begun(), *map(self._next, steady)]
            if self._asked and self._dice.random() < 0.08:
                commands += self._cancelled()
            waiting = slow
            for result in self._worker.round(*commands):
                text = self._asked.pop(result.op_id, None)  # type: ignore[union-attr]
                if text is None:
                    continue
                assert isinstance(result, Forward), result
                self.rows[text].append(row_of(result))
                if len(text.prompt) + len(self.rows[text]) < text.end:
                    waiting.append(text)
                else:
                    self._op_ids += 1
                    self._worker.loop.submit([Release(self._op_ids, [text.sequence])])

    def _begun(self) -> Iterator[Forward]:
        dice = self._dice
        if len(self._asked) >= 7 or (self._asked and dice.random() < 0.85):
            return
        self._sequences += 1
        count = dice.choice([1, 15, 90, 90, 90])
        prompt = tuple(dice.randrange(VOCAB) for _ in range(count))
        end = count + dice.randint(2, 25)
        text = Text(self._sequences, dice.choice(self._kinds), prompt, end, dice.random() < 0.9)
        self.rows[text] = []
        yield self._next(text)

    def _next(self, text: Text) -> Forward:
        self._op_ids += 1
        self._asked[self._op_ids] = text
        return text.command(self._op_ids, [*text.prompt, *(token for token, _ in self.rows[text])])

    def _cancelled(self) -> list[Command]:
        """Of a text that waits for an answer: it gets none, and is released."""
        op_id = self._dice.choice([*self._asked])
        text = self._asked.pop(op_id)
        self._op_ids += 2
        return [Abort(self._op_ids - 1, op_id), Release(self._op_ids, [text.sequence])]


# Each seed has other kinds of rows; a queue that is late is another schedule of the same.
@pytest.mark.parametrize(
    ("seed", "is_late", "rounds"),
    [
        (0, False, 40),
        (1, True, 40),
        *(
            pytest.param(seed, is_late, 60, marks=pytest.mark.thorough)
            for seed in range(12)
            for is_late in (False, True)
        ),
    ],
)
def test_each_text_has_the_tokens_and_bits_that_it_has_alone(
    decoder: Decoder, seed: int, is_late: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    queue = WorkingQueue() if is_late else None
    graph = CudaGraphRunner(
        decoder, make_kv("cpu"), max_rows=8, max_seq_len=256, capture=ForwardsFirst(8), queue=queue
    )
    worker = worker_of(graph, ahead=True)
    graph._kv, graph._eager = worker.engine.kv, BehindTheQueue(decoder, worker.engine.kv)
    graph._eager.queue = queue
    worker.loop._prelauncher.prelaunch_unrequested = seed % 2 == 0
    ahead, with_chunks = [0], [0]
    launch_after = launched_steps.launch_after

    def launched(
        engine: Engine,
        before: StepInFlight,
        decodes: Decodes,
        joining: Decodes = NO_DECODES,
        chunks: Sequence[Chunk] = (),
    ) -> StepInFlight | None:
        step = launch_after(engine, before, decodes, joining, chunks)
        ahead[0] += step is not None
        with_chunks[0] += step is not None and bool(chunks)
        return step

    monkeypatch.setattr(launched_steps, "launch_after", launched)
    callers = Callers(worker, random.Random(seed), range(len(KINDS)) if seed % 2 else LAUNCHED)
    callers.run(rounds)
    assert ahead[0] > 2 and with_chunks[0] > 2, "else nothing was shown"
    reference = worker_of(EagerRunner(decoder, make_kv("cpu")), ahead=False)
    reference.engine.runner = EagerRunner(decoder, reference.engine.kv)
    assert sum(map(len, callers.rows.values())) > 4 * rounds // 3
    for text, rows in callers.rows.items():
        assert rows == alone(reference, text, len(rows)), text
