"""Adapters in the decode runner: slots are a column of its buffers, and batches without adapters ignore it.

Launches take the place of CUDA graphs, as in test_decode_runner.py, on a GPU too: they show what is replayed.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.sizes import repeat_launches
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda import test_decode_runner
from tests.kernels.cuda.test_capture_failures import OUT_OF_MEMORY, FailingCapture
from tests.kernels.cuda.test_decode_runner import PAGES, VOCAB, Twins, make_kv
from tests.kernels.cuda.test_lora_cuda import use_triton
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.kv.tensors import KvTensors
from workers.models.builder import build_decoder
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.models.lora import LoraPair, LoraWeights
from workers.outputs import Sampling
from workers.runners.cuda_graph import CudaGraphRunner, buckets_up_to
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.eager import EagerRunner
from workers.runners.working_memory import measure_working_bytes
from workers.sampling import SamplingRow

sent = test_decode_runner.sent
without_adapters = test_decode_runner.decoder

SLOTS, MAX_RANK, MAX_ROWS = 3, 5, 4
# Whether adapters were applied, and the column of slots, padding included.
Replay = tuple[bool, list[int]]


def make_adapter(decoder: Decoder, seed: int) -> LoraWeights:
    """For most of the modules; what it adds is about as large as its inputs."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = {}
    for name, (outputs, inputs) in decoder.adaptable().modules.items():
        rank = dice.randint(0, MAX_RANK)
        if rank:
            a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
            weights[name] = LoraPair(a / inputs**0.5, b / rank**0.5)
    return weights


def set_adapters(decoder: Decoder) -> None:
    decoder.allocate_lora(SLOTS, MAX_RANK)
    for slot in range(SLOTS):
        decoder.set_lora(slot, decoder.pack_lora(make_adapter(decoder, slot)))


@pytest.fixture
def decoder(without_adapters: Decoder) -> Decoder:
    """With an adapter in each slot."""
    set_adapters(without_adapters)
    return without_adapters


def on_cpu(decoder: Decoder) -> Decoder:
    """A copy, without adapters."""
    made = build_decoder(decoder.config, decoder.dtype, "cpu")
    sources = decoder.targets()
    for name, target in made.targets().items():
        target.tensor.copy_(sources[name].tensor)
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    seen: list[Replay] = []
    decode = CudaGraphRunner._decode

    def record(
        self: CudaGraphRunner, buffers: DecodeBuffers, bucket: int, capture: RowCapture, *, lora: bool
    ) -> torch.Tensor:
        slots = buffers.inputs(bucket, lora=True).lora_slots
        assert slots is not None
        seen.append((lora, slots.tolist()))
        return decode(self, buffers, bucket, capture, lora=lora)

    monkeypatch.setattr(CudaGraphRunner, "_decode", record)
    return seen


def make_twins(decoder: Decoder, device: str) -> Twins:
    return Twins(decoder, device, MAX_ROWS, repeat_launches)


def test_a_model_adds_what_it_adds_on_the_cpu(
    without_adapters: Decoder, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other code selects rows and matrices."""
    slots, lengths = (0, -1, 2, 1, 0), (1, 3, 20, 7, 5)
    wanted = ((0,), (1,), (3, -1), (), (0, 1))
    found = []
    for model, on in ((on_cpu(without_adapters), "cpu"), (without_adapters, device)):
        set_adapters(model)
        packer = HandPacker(16, range(1, PAGES))
        sequences = [HandSequence(lora_slot=slot) for slot in slots]
        inputs = packer.pack(
            [Item(*each) for each in zip(sequences, map(range, lengths), wanted, strict=True)]
        )
        rows = [SamplingRow()] * len(inputs.wanted_rows)
        found.append(EagerRunner(model, make_kv(on)).step(inputs, rows).logits.cpu())
        use_triton(monkeypatch)  # for the second model
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SELDOM)])
def test_any_schedule_of_adapters(decoder: Decoder, device: str, seed: int) -> None:
    dice = random.Random(seed)
    twins = make_twins(decoder, device)
    sequences = [HandSequence(lora_slot=dice.randrange(-1, SLOTS)) for _ in range(7)]
    for sequence in sequences:
        twins.step([Item(sequence, [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))])])
    tokens = [dice.randrange(VOCAB) for _ in sequences]
    for turn in range(8):
        picked = dice.sample(range(7), dice.choice([1, 2, 3, 4, 7]))
        if turn == 4:
            decoder.set_lora(0, decoder.pack_lora(make_adapter(decoder, 9)))
            decoder.set_lora(1, None)
        items = [Item(sequences[index], [tokens[index]]) for index in picked]
        spec = dice.choice([None, Sampling(temperature=0.8, seed=7)])
        rows = [SamplingRow(spec, position=sequences[index].length + 1) for index in picked]
        for index, token in zip(picked, twins.step(items, rows), strict=True):
            tokens[index] = token


def test_batches_without_adapters_run_without_them(
    decoder: Decoder, device: str, replays: list[Replay]
) -> None:
    twins = make_twins(decoder, device)
    adapted, plain = HandSequence(lora_slot=2), [HandSequence() for _ in range(2)]
    for sequence in (adapted, *plain):
        twins.step([Item(sequence, [5, 6])])
    twins.step([Item(plain[0], [1])])
    # At the first decode, all graphs were captured, in which all rows are padded.
    assert [lora for lora, _ in replays[:-1]] == [True, False] * len(buckets_up_to(MAX_ROWS))
    assert all(set(slots) == {-1} for _, slots in replays)
    del replays[:]
    twins.step([Item(sequence, [2]) for sequence in (*plain, adapted)])
    twins.step([Item(plain[0], [3])])
    twins.step([Item(adapted, [3])])
    twins.step([Item(sequence, [4]) for sequence in plain])
    assert replays == [(True, [-1, -1, 2, -1]), (False, [-1]), (True, [2]), (False, [-1, -1])]


def test_another_adapter_is_sent_and_the_same_is_not(decoder: Decoder, device: str, sent: list[bool]) -> None:
    """Also where tokens, positions and pages are those that the device has."""
    twins = make_twins(decoder, device)
    sequence = HandSequence(lora_slot=1)
    twins.step([Item(sequence, [5, 6])])
    (token,) = twins.step([Item(sequence, [1])])
    for slot in (1, 1, 0, 0, -1, -1, 0, 1):
        sequence.lora_slot = slot
        (token,) = twins.step([Item(sequence, [token])])
    assert sent == [True, False, False, True, False, True, False, True, True]


def test_steps_ahead_have_the_adapters_of_the_last(decoder: Decoder, device: str) -> None:
    twins = make_twins(decoder, device)
    sequence = HandSequence(lora_slot=1)
    twins.step([Item(sequence, range(5))])
    (token,) = twins.step([Item(sequence, [1])])
    twins.graph.replay_last(2)
    keys = twins.graph._kv.layer(1)[0].data.clone()
    for _ in range(2):
        inputs = twins.packer.pack([Item(sequence, [token])])
        token = int(twins.eager.step(inputs, [SamplingRow()]).chosen)
    torch.testing.assert_close(keys, twins.eager._kv.layer(1)[0].data, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_without_slots_there_are_no_graphs_for_them(
    without_adapters: Decoder, device: str, replays: list[Replay]
) -> None:
    twins = make_twins(without_adapters, device)
    twins.step([Item(HandSequence(), [1])])
    assert [lora for lora, _ in replays] == [False] * (len(buckets_up_to(MAX_ROWS)) + 1)


def test_graphs_with_adapters_are_captured_when_there_are_slots(
    without_adapters: Decoder, device: str, replays: list[Replay]
) -> None:
    """Between two steps. Those before and after it are the same as without graphs."""
    twins = make_twins(without_adapters, device)
    sequences = [HandSequence() for _ in range(2)]
    for sequence in sequences:
        twins.step([Item(sequence, [5, 6])])
    twins.step([Item(sequence, [1]) for sequence in sequences])
    set_adapters(without_adapters)
    del replays[:]
    twins.graph.capture_lora()
    assert [lora for lora, _ in replays] == [True] * len(buckets_up_to(MAX_ROWS))
    sequences[0].lora_slot = 1
    del replays[:]
    for token in (2, 3):
        twins.step([Item(sequence, [token]) for sequence in sequences])
        twins.step([Item(sequences[1], [token])])
    assert [lora for lora, _ in replays] == [True, False, True, False]
    twins.graph.capture_lora()
    assert len(replays) == 4, "once"


def test_decodes_with_adapters_run_where_their_graphs_could_not_be_captured(
    without_adapters: Decoder, device: str, replays: list[Replay]
) -> None:
    captures = (len(buckets_up_to(MAX_ROWS)) + 1) * 2
    twins = Twins(without_adapters, device, MAX_ROWS, FailingCapture(OUT_OF_MEMORY, captures))
    adapted, plain = HandSequence(), HandSequence()
    for sequence in (adapted, plain):
        twins.step([Item(sequence, [5, 6])])
    twins.step([Item(plain, [1])])
    set_adapters(without_adapters)
    twins.graph.capture_lora()
    adapted.lora_slot = 1
    del replays[:]
    twins.step([Item(adapted, [1]), Item(plain, [2])])
    twins.step([Item(plain, [3])])
    assert [lora for lora, _ in replays] == [False], "the others have theirs"
    assert twins.graph.name != "eager"


def test_adapters_are_applied_after_a_failed_capture(decoder: Decoder, device: str) -> None:
    twins = Twins(decoder, device, MAX_ROWS, FailingCapture(OUT_OF_MEMORY, 3))
    sequence = HandSequence(lora_slot=1)
    twins.step([Item(sequence, [5, 6])])
    twins.step([Item(sequence, [1])])
    assert twins.graph.name == "eager"


def test_the_working_memory_includes_adapters(
    without_adapters: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step has one in each row. Graphs with adapters share the memory of those without."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    plain, rows, forward = on_cpu(without_adapters), list[list[int]](), Decoder.forward

    def record(self: Decoder, inputs: ForwardInputs, kv: KvTensors) -> torch.Tensor:
        rows.append([] if inputs.lora_slots is None else inputs.lora_slots.tolist())
        return forward(self, inputs, kv)

    monkeypatch.setattr(Decoder, "forward", record)

    def measured() -> int:
        sizes = {"max_step_tokens": 40, "max_seq_len": 32, "max_rows": MAX_ROWS, "vocab_size": VOCAB}
        return measure_working_bytes(plain, make_kv("cpu"), **sizes)

    before_bytes = measured()
    set_adapters(plain)
    assert measured() == before_bytes
    assert rows == [[], [0] * 40]
