"""CUDA graphs: the same bits as the launches they hold, and nothing compiled once they are there."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable

import pytest
import torch
import triton

from tests.gpu.sizes import layers_of_each_kind, nan_kv, random_decoder, repeat_launches, sized
from tests.kernels.conftest import INTERPRETED, SELDOM
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.outputs import Sampling
from workers.runners.base import After
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.sampling import SamplingRow

torch.set_num_threads(1)

MAX_ROWS = sized(256, 3)
MAX_TOKENS = sized(4096, 64)
CONFIGS = layers_of_each_kind(MAX_TOKENS)
VOCAB = CONFIGS["dense"].vocab_size  # of all of them
PAGES = sized(20_000, 40)
# A batch that is full, one that is padded, and sizes between.
BATCHES = sized((1, 2, 3, 7, 8, 13, 24, 30, 33, 64, 100, 200, 256), (1, 3))
# Prefill attention, and variants of the others that go by the shape of a batch.
MOST_PREFILL_VARIANTS = 8
SPECS = (
    None,
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.3, seed=2**63),
    Sampling(temperature=0.9, top_p=0.8, seed=6),
    Sampling(temperature=1.1, top_k=20, min_p=0.01, seed=7),
)


# Rehearsed, they seldom tell more than tests/kernels/cuda/test_decode_runner.py and what is beside it.
KINDS = [pytest.param(name, marks=SELDOM) for name in CONFIGS]


@pytest.fixture(scope="module", params=KINDS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """One of each kind; a test that names a kind in `parametrize` has that one alone."""
    return random_decoder(CONFIGS[request.param], torch.device("cpu" if INTERPRETED else "cuda:0"))


of_one_kind = pytest.mark.parametrize("decoder", KINDS[:1], indirect=True)


def make_runner(decoder: Decoder, *, launched: bool) -> CudaGraphRunner:
    """With graphs, or with their launches."""
    kv = nan_kv(decoder, PAGES)
    capture = repeat_launches if launched or INTERPRETED else None
    return CudaGraphRunner(decoder, kv, max_rows=MAX_ROWS, max_seq_len=MAX_TOKENS, capture=capture)


def random_tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]


def random_rows(dice: random.Random, sequences: list[HandSequence]) -> list[SamplingRow]:
    return [SamplingRow(dice.choice(SPECS), position=sequence.length + 1) for sequence in sequences]


def test_a_replay_gives_the_bits_of_its_launches(decoder: Decoder) -> None:
    dice, packer = random.Random(1), HandPacker(16, range(1, PAGES))
    replayed, launched = (make_runner(decoder, launched=launched) for launched in (False, True))
    for batch in BATCHES:
        sequences = [HandSequence() for _ in range(batch)]
        for sequence in sequences:
            length = dice.randint(1, sized(300, 20))
            inputs = packer.pack([Item(sequence, random_tokens(dice, length), ())])
            for runner in (replayed, launched):
                runner.step(inputs, [])
        tokens = random_tokens(dice, batch)
        for _ in range(sized(20, 2)):
            inputs = packer.pack([Item(s, [token]) for s, token in zip(sequences, tokens, strict=True)])
            rows = random_rows(dice, sequences)
            ours, theirs = replayed.step(inputs, rows), launched.step(inputs, rows)
            assert torch.equal(ours.logits, theirs.logits), f"batch {batch}"
            tokens = ours.chosen.tolist()
            assert tokens == theirs.chosen.tolist()
        for sequence in sequences:
            packer.free_pages += sequence.pages
    assert replayed.name == "cuda_graph", "the graphs could not be captured"


@of_one_kind
def test_steps_launched_ahead_choose_the_same_tokens(decoder: Decoder) -> None:
    """As many as a text has, each of them before the tokens of the last one are read."""
    dice, packer = random.Random(5), HandPacker(16, range(1, PAGES))
    ahead, waiting = (make_runner(decoder, launched=False) for _ in range(2))
    for batch in BATCHES:
        sequences = [HandSequence() for _ in range(batch)]
        for sequence in sequences:
            inputs = packer.pack([Item(sequence, random_tokens(dice, dice.randint(1, sized(300, 20))), ())])
            for runner in (ahead, waiting):
                runner.step(inputs, [])
        specs = [dice.choice(SPECS) for _ in sequences]
        tokens = random_tokens(dice, batch)
        inputs = packer.pack([Item(s, [token]) for s, token in zip(sequences, tokens, strict=True)])
        rows = [SamplingRow(spec, position=s.length) for s, spec in zip(sequences, specs, strict=True)]
        step = ahead.launch(inputs, rows, keeps_logits=True)
        for _ in range(sized(60, 3)):
            assert step is not None
            theirs = waiting.step(inputs, rows)
            tokens = theirs.chosen.tolist()
            inputs = packer.pack([Item(s, [token]) for s, token in zip(sequences, tokens, strict=True)])
            unknown = dataclasses.replace(inputs, token_ids=torch.full_like(inputs.token_ids, -1))
            following = ahead.launch(unknown, (), keeps_logits=True, after=After(step))
            assert step.chosen().tolist() == tokens
            with step.logits() as logits:
                assert torch.equal(logits, theirs.logits)
            step = following
            rows = [dataclasses.replace(row, position=row.position + 1) for row in rows]
        assert step is not None and len(step.chosen()) == batch
        for sequence in sequences:
            packer.free_pages += sequence.pages


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that Triton compiles, or loads from its cache, with their types and constants.

    That takes milliseconds to seconds in the middle of a step, so there must be none after warm-up.
    """
    variants: list[str] = []

    def note(*, repr: str = "", **_: object) -> None:  # noqa: A002 - the name that Triton gives it
        variants.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return variants


def test_nothing_is_compiled_after_the_graphs_are_captured(decoder: Decoder, compiled: list[str]) -> None:
    dice, packer = random.Random(2), HandPacker(16, range(1, PAGES))
    runner = make_runner(decoder, launched=False)
    sequences = [HandSequence() for _ in range(MAX_ROWS)]
    for sequence in sequences:
        runner.step(packer.pack([Item(sequence, random_tokens(dice, dice.randint(1, 9)), ())]), [])
    runner.step(packer.pack([Item(sequences[0], [1])]), [SamplingRow()])
    before = len(compiled)
    for _ in range(sized(300, 3)):
        picked = dice.sample(sequences, dice.randint(1, MAX_ROWS))
        inputs = packer.pack([Item(sequence, random_tokens(dice, 1)) for sequence in picked])
        runner.step(inputs, random_rows(dice, picked))
    assert compiled[before:] == [] and runner.name == "cuda_graph"


@of_one_kind
def test_prefills_compile_a_few_variants_and_then_none(decoder: Decoder, compiled: list[str]) -> None:
    dice, packer = random.Random(3), HandPacker(16, range(1, PAGES))
    runner = make_runner(decoder, launched=False)
    runner.step(packer.pack([Item(HandSequence(), [1])]), [SamplingRow()])
    before = len(compiled)
    for _ in range(sized(60, 2)):
        items = []
        for _ in range(dice.randint(1, 3)):
            count = dice.choice((1, dice.randint(2, sized(40, 8)), dice.randint(2, sized(700, 12))))
            items.append(Item(HandSequence(), random_tokens(dice, count), dice.choice(((), (-1,)))))
        # Decodes first, as the worker packs them.
        items.sort(key=lambda item: len(item.tokens))
        inputs = packer.pack(items)
        runner.step(inputs, [SamplingRow()] * len(inputs.wanted_rows))
        for item in items:
            packer.free_pages += item.sequence.pages
    new = compiled[before:]
    assert len(new) <= MOST_PREFILL_VARIANTS, new


@pytest.mark.gpu
@of_one_kind
def test_graphs_are_captured_while_another_thread_uses_the_device(decoder: Decoder) -> None:
    """As one that reads an adapter: it asks for the free memory, allocates, and reads rows back."""
    ended, errors = threading.Event(), list[Exception]()

    def use() -> None:
        while not ended.is_set():
            try:
                torch.cuda.mem_get_info()
                torch.arange(1 << 20, device="cuda").sum().item()
            except Exception as error:
                errors.append(error)
                return

    runner, packer = make_runner(decoder, launched=False), HandPacker(16, range(1, PAGES))
    thread = threading.Thread(target=use)
    thread.start()
    try:
        runner.step(packer.pack([Item(HandSequence(), [1])]), [SamplingRow()])
    finally:
        ended.set()
        thread.join()
    assert runner.name == "cuda_graph" and not errors


class Uncapturable(Decoder):
    """A model that does something while a graph is captured that fails there, after `succeed` captures."""

    def __init__(self, decoder: Decoder, fail: Callable[[], object], succeed: int) -> None:
        vars(self).update(vars(decoder))
        self._fail, self._succeed = fail, succeed

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        hidden = super().forward(inputs, kv, capture)
        if torch.cuda.is_current_stream_capturing():
            self._succeed -= 1
            if self._succeed < 0:
                self._fail()
        return hidden


def run_out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def reserved_bytes() -> int:
    """Without unused memory, and without the workspaces that libraries keep for each stream."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.gpu
@of_one_kind
@pytest.mark.parametrize("succeed", [0, 3])
@pytest.mark.parametrize("fail", [torch.cuda.synchronize, run_out_of_memory], ids=["invalid", "memory"])
def test_a_failed_capture_leaves_the_device_as_it_was(
    decoder: Decoder, fail: Callable[[], object], succeed: int
) -> None:
    kvs = [nan_kv(decoder, PAGES) for _ in range(2)]
    broken = Uncapturable(decoder, fail, succeed)
    runner = CudaGraphRunner(broken, kvs[0], max_rows=MAX_ROWS, max_seq_len=MAX_TOKENS)
    eager = EagerRunner(decoder, kvs[1])
    dice, packer = random.Random(4), HandPacker(16, range(1, PAGES))
    sequence = HandSequence()
    prompt = packer.pack([Item(sequence, random_tokens(dice, 30), ())])
    for one in (runner, eager):
        one.step(prompt, [])
    stream = torch.cuda.current_stream()
    before_bytes = reserved_bytes()
    for token in random_tokens(dice, 3):
        inputs = packer.pack([Item(sequence, [token])])
        logits = [one.step(inputs, [SamplingRow()]).logits for one in (runner, eager)]
        assert torch.equal(*logits)
        logits.clear()
    assert runner.name == "eager" and torch.cuda.current_stream() == stream
    assert reserved_bytes() <= before_bytes
    # The next ones, with all that works, are captured.
    working = make_runner(decoder, launched=False)
    working.step(packer.pack([Item(HandSequence(), [1])]), [SamplingRow()])
    assert working.name == "cuda_graph"
