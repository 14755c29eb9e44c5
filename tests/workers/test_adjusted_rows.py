"""Rows with masks, biases, penalties and filters in decode graphs: each gets the token that it gets alone.

The graphs' own kernels run in Triton's interpreter. What is compared with runs the model on the CPU, row by
row, and chooses there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.gpu.sizes import ForwardsFirst
from tests.kernels import conftest
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.device_sampling import Columns
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.outputs import Sampling, TokenMask
from workers.runners import adjusted_rows, cuda_graph
from workers.runners.base import After, LaunchedStep, StepResult
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.device_queue import DeviceQueue
from workers.runners.eager import EagerRunner, choose_tokens
from workers.sampling import NothingAllowedError, SamplingRow

if not conftest.HAS_TRITON or not conftest.INTERPRETED:
    pytest.skip("the interpreter of Triton is needed", allow_module_level=True)

_silent_numpy = conftest._silent_numpy
_useless_new_memory = conftest._useless_new_memory

from tests.kernels.cuda.test_decode_runner import (  # noqa: E402 - interpreted
    SETTINGS,
    VOCAB,
    LateQueue,
    make_kv,
    random_decoder,
)

PAGES = 120
MAX_ROWS = 6
INF = float("inf")
# Of one row each: how it is chosen, and whether it also has a mask.
KINDS: tuple[tuple[Sampling | None, bool], ...] = (
    (None, False),
    (Sampling(temperature=0.8, seed=7), False),
    (Sampling(temperature=1.5, top_k=5, seed=2**64 - 1), False),
    (Sampling(temperature=0.9, top_p=0.7, min_p=0.05, seed=3), True),
    (None, True),
    (Sampling(temperature=1.1, seed=5), True),
    (Sampling(logit_bias={3: 4.0, 90: 9.0, 11: -INF}), False),
    (Sampling(temperature=1.3, logit_bias=dict.fromkeys(range(0, VOCAB, 2), -INF), seed=6), False),
    (Sampling(repetition_penalty=1.7, frequency_penalty=0.4), False),
    (Sampling(temperature=0.9, presence_penalty=1.5, logit_bias={5: 3.0}, top_k=9, seed=8), True),
    (Sampling(temperature=1.2, typical_p=0.5, top_k=60, seed=9), False),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = random_decoder(SETTINGS, "cpu")
    made.pack()  # then the bits of a row do not depend on the other ones
    assert made.batch_invariant
    return made


@dataclasses.dataclass
class Text:
    """A sequence in the pages of both runners, and how its tokens are chosen."""

    kind: int
    sequence: HandSequence
    tokens: list[int]  # all but the last are in the pages
    prompt_len: int

    def row(self, dice: random.Random) -> SamplingRow:
        """How the token after the last one is chosen: every one has a mask of its own."""
        spec, is_masked = KINDS[self.kind]
        mask = None
        if is_masked:
            allowed = dice.sample(range(VOCAB + 3), dice.choice([1, 3, 40]))
            bits = np.packbits(np.isin(np.arange(VOCAB), allowed), bitorder="little").tobytes()
            mask = TokenMask(allowed=allowed) if dice.random() < 0.5 else TokenMask(packed=bits)
            if min(allowed) >= VOCAB:
                mask = TokenMask(allowed=[1])
        return SamplingRow(spec, mask, len(self.tokens), list(self.tokens), self.prompt_len)


class Runners:
    """A runner of graphs, and one that computes each row alone."""

    def __init__(self, decoder: Decoder, queue: DeviceQueue | None = None) -> None:
        self.graph = CudaGraphRunner(
            decoder,
            make_kv("cpu"),
            max_rows=MAX_ROWS,
            max_seq_len=256,
            capture=ForwardsFirst(MAX_ROWS),
            queue=queue,
        )
        self.alone = EagerRunner(decoder, make_kv("cpu"))
        self.packer = HandPacker(16, range(1, PAGES))

    def begin(self, kind: int, prompt: list[int]) -> Text:
        text = Text(kind, HandSequence(), list(prompt), len(prompt))
        inputs = self.packer.pack([Item(text.sequence, prompt)])
        chosen = [runner.step(inputs, [SamplingRow()]).chosen.tolist() for runner in (self.graph, self.alone)]
        assert chosen[0] == chosen[1]
        text.tokens += chosen[0]
        return text

    def end(self, text: Text) -> None:
        self.packer.free_pages += text.sequence.pages

    def pack(self, texts: Sequence[Text]) -> ForwardInputs:
        return self.packer.pack([Item(text.sequence, [text.tokens[-1]]) for text in texts])

    def pack_ahead(self, texts: Sequence[Text]) -> ForwardInputs:
        """For a step whose tokens may be unknown; what is packed next of a text is the same token."""
        ahead = [HandSequence(text.sequence.pages, text.sequence.length) for text in texts]
        return self.packer.pack(
            [Item(each, [text.tokens[-1]]) for each, text in zip(ahead, texts, strict=True)]
        )

    def expect(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow]
    ) -> tuple[list[int | None], torch.Tensor]:
        """What each row gets alone. None: no token is allowed."""
        found: list[int | None] = []
        logits = []
        attention = inputs.attention
        for at, row in enumerate(rows):
            own = dataclasses.replace(
                inputs,
                token_ids=inputs.token_ids[at : at + 1],
                positions=inputs.positions[at : at + 1],
                slots=inputs.slots[at : at + 1],
                wanted_rows=torch.zeros(1, dtype=torch.int64),
                attention=dataclasses.replace(
                    attention,
                    page_tables=attention.page_tables[at : at + 1],
                    query_starts=attention.query_starts[:2],
                    context_lens=attention.context_lens[at : at + 1],
                    query_lens=[1],
                    context_lens_host=attention.context_lens_host[at : at + 1],
                ),
            )
            result = self.alone.step(own, [row])
            assert all(isinstance(why, NothingAllowedError) for why in result.failed.values())
            found.append(None if result.failed else int(result.chosen))
            logits.append(result.logits)
        return found, torch.cat(logits)

    def read(
        self,
        step: LaunchedStep,
        inputs: ForwardInputs,
        texts: Sequence[Text],
        rows: Sequence[SamplingRow],
    ) -> None:
        """Reads a launched step: each text has the token that it gets alone."""
        expected, _ = self.expect(inputs, rows)
        assert step.chosen().tolist() == expected
        for text, token in zip(texts, expected, strict=True):
            assert token is not None
            text.tokens.append(token)

    def step(self, texts: Sequence[Text], rows: Sequence[SamplingRow]) -> None:
        """One step of all. A text without an allowed token is tried again with the next one."""
        inputs = self.pack(texts)
        expected, logits = self.expect(inputs, rows)
        result = self.graph.step(inputs, rows)
        assert torch.equal(result.logits, logits)
        failed = [at for at, token in enumerate(expected) if token is None]
        assert sorted(result.failed) == failed
        for text, token, ours in zip(texts, expected, result.chosen.tolist(), strict=True):
            if token is None:
                text.sequence.length -= 1
                continue
            assert token == ours, KINDS[text.kind]
            text.tokens.append(token)


@pytest.fixture
def runners(decoder: Decoder) -> Runners:
    """Over a device that does nothing before it has to."""
    return Runners(decoder, LateQueue())


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of any row is chosen beside the graphs."""
    monkeypatch.setattr(cuda_graph, "choose_tokens", lambda *_: pytest.fail("beside the graphs"))


@pytest.mark.usefixtures("inside")
# Other seeds, and a device that does everything at once, seldom tell more.
@pytest.mark.parametrize(
    ("seed", "is_late"),
    [
        (0, True),
        *(
            pytest.param(seed, is_late, marks=pytest.mark.thorough)
            for seed in range(20)
            for is_late in (False, True)
            if (seed, is_late) != (0, True)
        ),
    ],
)
def test_any_mix_of_rows_that_come_and_go(
    decoder: Decoder, is_late: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs of more than one part, and launched ahead where rows allow it."""
    runners = Runners(decoder, LateQueue() if is_late else None)
    monkeypatch.setattr(cuda_graph, "ROWS_AT_ONCE", 4)
    dice, texts = random.Random(seed), list[Text]()
    for _ in range(14):
        if not texts or (len(texts) < 8 and dice.random() < 0.6):
            prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
            texts.append(runners.begin(dice.randrange(len(KINDS)), prompt))
        if len(texts) > 2 and dice.random() < 0.15:
            runners.end(texts.pop(dice.randrange(len(texts))))
        picked = dice.sample(texts, dice.randint(1, min(len(texts), MAX_ROWS)))
        rows = [text.row(dice) for text in picked]
        if dice.random() < 0.1:
            rows[-1] = dataclasses.replace(rows[-1], mask=TokenMask(allowed=[VOCAB]))
        runners.step(picked, rows)
        ahead = [text for text in texts if not may_change(text)]
        if dice.random() < 0.3 and ahead:
            run_ahead(runners, ahead[:MAX_ROWS], [text for text in texts if text not in ahead], dice)


def may_change(text: Text) -> bool:
    """Whether the host has to know a token before it can say how the next one is chosen."""
    return KINDS[text.kind][1]


def row_ahead(text: Text) -> SamplingRow:
    """The one after the next: the host does not know the token before it."""
    end = len(text.tokens)
    return SamplingRow(KINDS[text.kind][0], None, end + 1, [*text.tokens, -1], text.prompt_len)


def run_ahead(runners: Runners, texts: list[Text], others: list[Text], dice: random.Random) -> None:
    """Each step is launched before the tokens of the one before it are read.

    Some texts end on the way, and others join, with masks, too.
    """
    step: LaunchedStep | None = None
    drawn = dict[int, SamplingRow]()
    for turn in range(4):
        inputs = runners.pack(texts)
        rows = [drawn[id(text)] if id(text) in drawn else text.row(dice) for text in texts]
        drawn = {}
        step = step or runners.graph.launch(inputs, rows)
        assert step is not None
        following, joining = None, list[Text]()
        left = [at for at, text in enumerate(texts) if not may_change(text)]
        if turn < 3 and left:
            if len(left) > 1 and dice.random() < 0.4:
                del left[dice.randrange(len(left))]
            if others and len(left) < MAX_ROWS and dice.random() < 0.5:
                joining = [others.pop()]
                drawn = {id(joining[0]): joining[0].row(dice)}
            after, rows_ahead = After(step), list[SamplingRow]()
            if joining or len(left) < len(texts):
                after = After(step, np.array([*left, *[-1] * len(joining)]))
                rows_ahead = [*(row_ahead(texts[at]) for at in left), *drawn.values()]
            packed = runners.pack_ahead([*(texts[at] for at in left), *joining])
            following = runners.graph.launch(packed, rows_ahead, after=after)
            assert following is not None
        runners.read(step, inputs, texts, rows)
        texts, step = [*(texts[at] for at in left), *joining], following
        if step is None:
            return


@pytest.mark.usefixtures("inside")
def test_what_is_adjusted_stays_on_the_device(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent for a text with biases whose caller takes the chosen tokens."""
    sent: list[bool] = []
    load, send = DecodeBuffers.load, adjusted_rows.AdjustedRows._send

    def loaded(buffers: DecodeBuffers, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> None:
        sent.append(load(buffers, inputs, rows))

    def noted(adjusted: adjusted_rows.AdjustedRows, data: Columns) -> None:
        sent.append(True)
        send(adjusted, data)

    monkeypatch.setattr(DecodeBuffers, "load", loaded)
    monkeypatch.setattr(adjusted_rows.AdjustedRows, "_send", noted)
    dice, text = random.Random(0), runners.begin(6, [1, 2, 3])
    for _ in range(4):
        runners.step([text], [text.row(dice)])
    # What pads the memory, the row and its biases, and then only that nothing was sent.
    assert sent == [True, True, True, False, False, False]


def test_rows_without_an_allowed_token_fail_alone(runners: Runners) -> None:
    dice = random.Random(0)
    texts = [runners.begin(kind, [kind, 2]) for kind in (0, 4, 8, 4)]
    rows = [text.row(dice) for text in texts]
    for at in (1, 3):
        rows[at] = dataclasses.replace(rows[at], mask=TokenMask(allowed=[]))
    runners.step(texts, rows)
    launched = runners.graph.launch(runners.pack(texts[:2]), rows[:2])
    assert launched is not None
    with pytest.raises(NothingAllowedError) as caught:
        launched.chosen()
    assert caught.value.rows == (1,)


@pytest.mark.usefixtures("inside")
def test_penalties_of_a_step_launched_ahead_count_the_token_that_only_the_device_has(
    runners: Runners,
) -> None:
    """The rows change, so that histories are counted anew; then they stay."""
    dice = random.Random(3)
    texts = [runners.begin(kind, [at] * 9) for at, kind in enumerate((8, 0, 8))]
    inputs, rows = runners.pack(texts), [text.row(dice) for text in texts]
    step: LaunchedStep | None = runners.graph.launch(inputs, rows)
    for where in ([1, 2], None, None, [1, 0], None):
        assert step is not None
        left = texts if where is None else [texts[at] for at in where]
        after = After(step, None if where is None else np.array(where))
        following = runners.graph.launch(
            runners.pack_ahead(left), [] if where is None else [row_ahead(text) for text in left], after=after
        )
        runners.read(step, inputs, texts, rows)
        texts, step = left, following
        inputs, rows = runners.pack(texts), [text.row(dice) for text in texts]


@pytest.mark.parametrize("name", ["_BIASES", "_HISTORY"])
def test_what_has_no_room_is_adjusted_beside_the_graph(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(adjusted_rows, name, 1)
    beside: list[int] = []

    def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> StepResult:
        beside.append(len(rows))
        return choose_tokens(logits, rows)

    monkeypatch.setattr(cuda_graph, "choose_tokens", choose)
    dice = random.Random(1)
    texts = [runners.begin(kind, list(range(9))) for kind in (6, 7, 8, 9, 4, 0)]
    for few in ((4, 5), range(6), (4, 5), range(6), (0,)):
        picked = [texts[at] for at in few]
        runners.step(picked, [text.row(dice) for text in picked])
    assert beside == [6, 6]
    inputs, rows = runners.pack(texts[1:2]), [texts[1].row(dice)]
    step = runners.graph.launch(inputs, rows)
    assert (step is None) == (name == "_BIASES")
    if step is not None:
        after = After(step, np.array([0, -1]))
        joined = [row_ahead(texts[1]), texts[2].row(dice)]
        assert runners.graph.launch(runners.pack_ahead(texts[1:3]), joined, after=after) is None
        assert step.chosen().tolist() == runners.expect(inputs, rows)[0]


def test_while_a_launched_step_is_not_read_others_run_beside_it(runners: Runners) -> None:
    """They leave the buffers alone: what follows the launched step continues with its tokens."""
    dice = random.Random(4)
    texts = [runners.begin(kind, [kind, 3]) for kind in (0, 1, 6)]
    others = [runners.begin(kind, [kind, 4]) for kind in (4, 8, 0)]
    inputs, rows = runners.pack(texts), [text.row(dice) for text in texts]
    step = runners.graph.launch(inputs, rows)
    assert step is not None
    for _ in range(3):
        assert runners.graph.launch(runners.pack(others[2:]), [SamplingRow()]) is None
        others[2].sequence.length -= 1
        runners.step(others, [text.row(dice) for text in others])
        following = runners.graph.launch(runners.pack_ahead(texts), (), after=After(step))
        assert following is not None
        runners.begin(0, [7] * 20)
        runners.read(step, inputs, texts, rows)
        inputs, rows, step = runners.pack(texts), [text.row(dice) for text in texts], following
    assert step.chosen().tolist() == runners.expect(inputs, rows)[0]
    for text in texts:
        text.sequence.length -= 1
    both = [*texts, *others]
    runners.step(both, [text.row(dice) for text in both])


class CheckedQueue(LateQueue):
    """Fails if memory that a copy reads has changed since its launch. A launch may be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_after: int | None = None

    def launch(self, run: Callable[[], object]) -> None:
        if self.fails_after == 0:
            self.fails_after = None
            raise RuntimeError("planted")
        if self.fails_after is not None:
            self.fails_after -= 1
        read = [(tensor, tensor.clone()) for tensor in staged_in(run)]

        def checked() -> None:
            for tensor, before in read:
                assert torch.equal(tensor, before), "the host has changed what a copy reads"
            run()

        super().launch(checked)


def staged_in(run: Callable[[], object]) -> Iterator[torch.Tensor]:
    """The host memory that a launched copy reads."""
    cells = getattr(run, "__closure__", None) or ()
    for name, cell in zip(run.__code__.co_freevars if cells else (), cells, strict=True):
        if name == "staged":
            yield cell.cell_contents
        elif name == "pairs":
            yield from (staged[:size] for _, staged, size in cell.cell_contents)


# Other launches of the same step: the first and the last of these find nearly the same mistakes.
@pytest.mark.parametrize(
    ("is_ahead", "fails_after"),
    [
        *((False, 0), (False, 4), (True, 3)),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in ((False, 1), (False, 2), (False, 3), (True, 0))
        ),
    ],
)
def test_memory_of_a_launch_that_failed_is_not_written_while_it_is_read(
    decoder: Decoder, fails_after: int, is_ahead: bool
) -> None:
    """Its copies may still be pending. The same steps are run again, and then others."""
    queue, dice = CheckedQueue(), random.Random(0)
    runners = Runners(decoder, queue)
    texts = [runners.begin(kind, list(range(15))) for kind in (0, 6, 1)]
    runners.step(texts, [text.row(dice) for text in texts])
    inputs, rows = runners.pack(texts), [text.row(dice) for text in texts]
    if is_ahead:
        step = runners.graph.launch(inputs, rows)
        assert step is not None
        queue.fails_after = fails_after
        following, after = runners.pack_ahead([texts[0], texts[2]]), After(step, np.array([0, 2]))
        with pytest.raises(RuntimeError, match="planted"):
            runners.graph.launch(following, [rows[0], rows[2]], after=after)
        queue.fails_after = None
        runners.read(step, inputs, texts, rows)
    else:
        queue.fails_after = fails_after
        with pytest.raises(RuntimeError, match="planted"):
            runners.graph.step(inputs, rows)
        queue.fails_after = None
        for text in texts:
            text.sequence.length -= 1
    for order in ((2, 0), (1,), (0, 1, 2), (2, 1)):
        picked = [texts[at] for at in order]
        runners.step(picked, [text.row(dice) for text in picked])


@pytest.mark.parametrize(
    "fails_after", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2)), 3]
)
def test_biases_of_earlier_rows_are_gone_after_a_failed_launch(decoder: Decoder, fails_after: int) -> None:
    queue = CheckedQueue()
    runners = Runners(decoder, queue)
    biased, masked = runners.begin(6, [1, 2]), runners.begin(4, [3, 4])
    runners.step([biased], [SamplingRow(Sampling(logit_bias={5: 1000.0}))])
    row = SamplingRow(None, TokenMask(allowed=range(VOCAB)))
    queue.fails_after = fails_after
    with pytest.raises(RuntimeError, match="planted"):
        runners.graph.step(runners.pack([masked]), [row])
    masked.sequence.length -= 1
    # In the place of which the one with biases was.
    runners.step([masked], [row])
