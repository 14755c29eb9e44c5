"""A step loop on a thread with the commands of a gateway: launched ahead, its tokens are those of one alone.

The decoder is batch-invariant, so that a row has the same bits in any company.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks.gpu.loop import LoopOnThread, packed_mask
from tests.commands import Fork, Release, Truncate
from tests.gpu.sizes import ForwardsFirst, layers_of_each_kind, nan_kv, random_decoder, sized
from tests.kernels.conftest import INTERPRETED
from tests.kernels.instruction_sets import need_compiled
from workers.executors.engine import Engine
from workers.kv.table import KvTable
from workers.models.decoder import Decoder
from workers.operations import Accept, Forward, Kind
from workers.outputs import GREEDY, OutputSpec, Sampling, TokenMask
from workers.runners.base import After
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.graph_steps import GraphStep

torch.set_num_threads(1)

MAX_TOKENS = 1024
CONFIG = layers_of_each_kind(MAX_TOKENS)["dense"]
VOCAB = CONFIG.vocab_size
PAGES = sized(2000, 120)
CALLERS = sized(24, 4)
STEPS = sized(60, 10)
# What the callers ask for.
OUTPUTS = (
    GREEDY,
    OutputSpec(sampling=Sampling(temperature=0.9, top_p=0.9, seed=5)),
    OutputSpec(top_logprobs=3),
    OutputSpec(mask=TokenMask(packed=packed_mask(VOCAB, 3))),
    OutputSpec(sampling=Sampling(temperature=0.8, repetition_penalty=1.2, logit_bias={5: 2.0}, seed=9)),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    found = random_decoder(CONFIG, torch.device("cpu" if INTERPRETED else "cuda:0"))
    if INTERPRETED:
        need_compiled()
        found.pack()
    found.batch_invariant = True
    return found


def start(decoder: Decoder, *, graphs: bool = True) -> LoopOnThread:
    """With pages of its own."""
    kv = nan_kv(decoder, PAGES)
    capture = ForwardsFirst(CALLERS) if INTERPRETED else None
    runner = CudaGraphRunner(
        decoder, kv, max_rows=CALLERS, max_seq_len=MAX_TOKENS, graphs=graphs, capture=capture
    )
    engine = Engine(KvTable(kv.num_pages, kv.page_size), kv, runner, batch_invariant=True)
    return LoopOnThread(engine, max_items=CALLERS, max_tokens=sized(512, 48), max_seq_tokens=MAX_TOKENS)


@dataclasses.dataclass
class Caller:
    """The cache has all tokens but the last one of the text."""

    sequence: int
    prompt: list[int]
    output: OutputSpec
    text: list[int] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.text) - 1


class Callers:
    """Callers of one loop, who do anything in any order; a new one in place of one that leaves."""

    def __init__(self, loop: LoopOnThread, dice: random.Random) -> None:
        self.loop, self.dice, self.all, self.new = loop, dice, list[Caller](), 0

    def arrive(self, output: OutputSpec) -> None:
        self.new += 1
        prompt = [self.dice.randrange(VOCAB) for _ in range(self.dice.randint(1, sized(300, 30)))]
        caller = Caller(self.new, prompt, output)
        caller.text.append(prefill(self.loop, caller.sequence, prompt, output))
        self.add(caller)

    def add(self, caller: Caller) -> None:
        self.all.append(caller)
        if len(self.all) > CALLERS:
            gone = self.all.pop(self.dice.randrange(len(self.all)))
            self.loop.ask([Release(self.loop.op_id(), [gone.sequence])])

    def decode(self) -> None:
        """Some tokens of those that want the same, or of some of them."""
        output = self.dice.choice(self.all).output
        asked = [caller for caller in self.all if caller.output is output]
        if self.dice.random() < 0.3:
            asked = self.dice.sample(asked, self.dice.randint(1, len(asked)))
        ahead = self.dice.random() < 0.8
        for _ in range(self.dice.randint(1, 6)):
            tokens = self.loop.decode(
                [caller.sequence for caller in asked],
                [caller.length for caller in asked],
                [caller.text[-1] for caller in asked],
                output,
                ahead=ahead,
            )
            for caller, token in zip(asked, tokens, strict=True):
                caller.text.append(token)

    def fork(self) -> None:
        caller = self.dice.choice(self.all)
        self.new += 1
        self.loop.ask([Fork(self.loop.op_id(), caller.sequence, [self.new])])
        self.add(dataclasses.replace(caller, sequence=self.new, text=list(caller.text)))

    def truncate(self) -> None:
        caller = self.dice.choice(self.all)
        if len(caller.text) > 1:
            caller.text.pop()
            self.loop.ask([Truncate(self.loop.op_id(), caller.sequence, caller.length)])

    def verify(self) -> None:
        """The last token, and a draft that is likely to be wrong."""
        greedy = [caller for caller in self.all if caller.output is GREEDY]
        if greedy:
            caller = self.dice.choice(greedy)
            drafts = [caller.text[-1], self.dice.randrange(VOCAB)]
            asked = Forward(
                self.loop.op_id(), caller.sequence, caller.length, drafts, rows=2, accept=Accept.CHOSEN,
                kind=Kind.VERIFY,
            )  # fmt: skip
            done = self.loop.ask([asked])[asked.op_id]
            assert isinstance(done, Forward)
            caller.text += [output.token_id for output in done.outputs[: done.kept]]


def prefill(loop: LoopOnThread, sequence: int, tokens: list[int], output: OutputSpec) -> int:
    """The chosen token."""
    asked = Forward(
        loop.op_id(), sequence, 0, tokens, output=output, kind=Kind.PREFILL, prompt_len=len(tokens),
        prelaunch=True,
    )  # fmt: skip
    done = loop.ask([asked])[asked.op_id]
    assert isinstance(done, Forward)
    return done.outputs[-1].token_id


def text_alone(decoder: Decoder, caller: Caller) -> list[int]:
    """The same text, with no other caller, no graph, and nothing computed ahead."""
    with start(decoder, graphs=False) as loop:
        text = [prefill(loop, 1, caller.prompt, caller.output)]
        while len(text) < len(caller.text):
            position = len(caller.prompt) + len(text) - 1
            text += loop.decode([1], [position], text[-1:], caller.output, ahead=False)
    return text


@pytest.mark.parametrize("seed", range(sized(3, 1)))
def test_callers_of_any_kind_have_the_tokens_of_one_alone(
    decoder: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, ahead, joined = random.Random(seed), [0], [0]
    launch = CudaGraphRunner.launch

    def note(
        runner: CudaGraphRunner, *arguments: Any, after: After | None = None, **named: Any
    ) -> GraphStep | None:
        step = launch(runner, *arguments, after=after, **named)
        if step is not None and after is not None:
            ahead[0] += 1
            joined[0] += after.places is not None and bool((after.places < 0).any())
        return step

    monkeypatch.setattr(CudaGraphRunner, "launch", note)
    with start(decoder) as loop:
        callers = Callers(loop, dice)
        for output in OUTPUTS:
            callers.arrive(output)
        others = (
            callers.fork,
            callers.truncate,
            callers.verify,
            lambda: callers.arrive(dice.choice(OUTPUTS)),
        )
        for _ in range(STEPS):
            callers.decode()
            if dice.random() < 0.4:
                dice.choice(others)()
    assert ahead[0], "no step was launched before the one before it was read"
    for caller in dice.sample(callers.all, min(len(callers.all), 8)):
        assert caller.text == text_alone(decoder, caller), caller.output
