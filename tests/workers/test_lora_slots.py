"""The memory of slots for adapters: how much, when it is taken, and what is said without enough."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapter_factory import make_adapter
from tests.commands import ChangeAdapters
from tests.model_factory import TinyModel, make_model
from workers import process
from workers.adapters.errors import AdapterError
from workers.common.worker_pb2 import WorkerConfig
from workers.executors.llm import LlmExecutor
from workers.executors.lora_slots import ModelSlots, most_slots
from workers.executors.memory import GPU_LORA_RANK, LoraLimits
from workers.executors.replacement import Served
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.linear import Linear
from workers.operations import AdapterRead, AdapterSource
from workers.runners.collectives import Collectives

MIB = 1 << 20
DEFAULTS = LoraLimits(64, GPU_LORA_RANK, 2 << 30)
# As Mistral-Large: 123B parameters.
LARGE = {
    "model_type": "mistral",
    "vocab_size": 32_768,
    "hidden_size": 12_288,
    "intermediate_size": 28_672,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def large(ranks: int) -> Decoder:
    group = Collectives(0, ranks) if ranks > 1 else None
    return build_decoder(ModelConfig.from_settings(LARGE), torch.bfloat16, "meta", group)


class OnGpu:
    """What is asked of a model on a GPU, which has slots once they are made."""

    def __init__(self, slot_bytes: int, *, fails: bool = False) -> None:
        self.device = torch.device("cuda", 0)
        self.max_lora_slots = 0
        self._slot_bytes, self._fails = slot_bytes, fails

    def lora_slot_bytes(self, max_rank: int) -> int:
        return self._slot_bytes * max_rank

    def allocate_lora(self, slots: int, max_rank: int) -> None:
        assert max_rank
        if self._fails:
            raise torch.OutOfMemoryError("planted")
        self.max_lora_slots = slots


def slots_of(model: Any, limits: LoraLimits) -> tuple[ModelSlots, list[None]]:
    made: list[None] = []
    return ModelSlots(Served(model), limits, lambda: made.append(None)), made


def test_a_slot_takes_what_kernels_allocate() -> None:
    stacked = pytest.importorskip("kernels.cuda.lora").StackedLora
    for ranks in (1, 8):
        decoder, found = large(ranks), 0
        for _, projection in decoder.projections():
            assert isinstance(projection, Linear)
            parts, weight = [*projection.parts.values()], projection.weight
            table = stacked(3, GPU_LORA_RANK, weight.shape[1], parts, torch.bfloat16, torch.device("meta"))
            found += table.a.nbytes + table.b.nbytes
        assert 3 * decoder.lora_slot_bytes(GPU_LORA_RANK) == found


def test_a_rank_has_its_part_of_a_slot() -> None:
    whole, part = (large(ranks).lora_slot_bytes(GPU_LORA_RANK) for ranks in (1, 8))
    assert whole > DEFAULTS.max_bytes, "of all projections, one slot of the default rank"
    # Each rank has all inputs of what is split by outputs, and all outputs of what is split by inputs.
    assert whole / 8 < part < 0.6 * whole
    assert (most_slots(whole, DEFAULTS), most_slots(part, DEFAULTS)) == (0, 1)


def test_a_model_whose_adapters_are_too_large_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Before, it was refused, though nobody had asked for adapters."""
    model = SimpleNamespace(
        device=torch.device("cuda"), lora_slot_bytes=large(1).lora_slot_bytes, max_lora_slots=0
    )
    slots, _ = slots_of(model, DEFAULTS)
    (said,) = caplog.messages
    assert "raise max_lora_bytes or lower max_lora_rank" in said
    with pytest.raises(AdapterError, match=r"rank 64 takes 2\d\d\d MiB: raise max_lora_bytes"):
        slots.find_room()
    lower = dataclasses.replace(DEFAULTS, max_rank=16)
    assert slots_of(model, lower)[0].max_lora_slots > 1


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, 80 << 30))


def test_slots_are_as_many_as_the_pages_have_left_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OnGpu(MIB)
    slots, made = slots_of(model, dataclasses.replace(DEFAULTS, max_bytes=64 * 10 * MIB))
    assert slots.max_lora_slots == 10
    free(monkeypatch, 64 * 20 * MIB)
    assert slots.find_room() == 10
    free(monkeypatch, (512 + 64 * 3 + 5) * MIB)
    slots.agree(slots.find_room())
    assert not model.max_lora_slots and not made
    assert [slots.make_slots() for _ in range(2)] == [3, 3]
    assert vars(model)["max_lora_slots"] == 3 and len(made) == 1
    free(monkeypatch, 0)
    assert slots.find_room() == 3, "they are there"


def test_without_memory_an_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, _ = slots_of(OnGpu(MIB), DEFAULTS)
    free(monkeypatch, 500 * MIB)
    with pytest.raises(AdapterError, match=r"has 500 MiB left.*576: lower gpu_memory_utilization"):
        slots.find_room()
    slots, made = slots_of(OnGpu(MIB, fails=True), DEFAULTS)
    with pytest.raises(AdapterError, match="no memory left"):
        slots.make_slots()
    assert not made


def test_slots_that_do_not_fit_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_settings({**LARGE, "num_hidden_layers": 2})
    decoder = build_decoder(config, torch.bfloat16, "meta")
    projections = [projection for _, projection in decoder.projections()]
    allocate, left = type(projections[0]).allocate_lora, 3

    def allocate_some(self: Any, slots: int, max_rank: int) -> None:
        nonlocal left
        left -= slots > 0
        if left < 0 and slots:
            raise torch.OutOfMemoryError("planted")
        allocate(self, slots, max_rank)

    monkeypatch.setattr(type(projections[0]), "allocate_lora", allocate_some)
    with pytest.raises(torch.OutOfMemoryError):
        decoder.allocate_lora(2, 4)
    assert not decoder.max_lora_slots and all(projection.lora is None for projection in projections)


def test_the_memory_is_taken_when_the_first_adapter_is_loaded(tmp_path: Path) -> None:
    """And not by a model that nobody adapts."""
    directory = make_model(tmp_path / "model", TinyModel())
    adapter = make_adapter(tmp_path / "adapter", directory, 1, rank=4)
    limits = LoraLimits(max_adapters=3, max_rank=8, max_bytes=MIB)
    executor = LlmExecutor.load(directory, kv_pages=16, lora=limits, self_check=False)
    model, table = executor.engine.runner._model, executor.adapters  # type: ignore[attr-defined]
    executor.warmup()
    assert table is not None and executor.capabilities().max_lora_adapters == 3
    assert model.max_lora_slots == 0
    assert all(projection.lora is None for _, projection in model.projections())
    reads: list[AdapterRead] = []
    table._on_thread = lambda read: read()
    table.report_to(reads.append)
    table.change(1, ChangeAdapters(1, [AdapterSource(1, str(adapter))], load=True).adapter)
    table.read(reads.pop())
    table.advance(set)
    assert model.max_lora_slots == 3


def test_none_can_be_asked_for(tmp_path: Path) -> None:
    config = WorkerConfig(max_lora_adapters=0, max_lora_bytes=MIB)
    assert process._lora_limits(config, "cuda:0") is None
    config.max_lora_adapters = 2
    assert process._lora_limits(config, "cuda:0") == LoraLimits(2, GPU_LORA_RANK, MIB)
    assert process._lora_limits(config, "cpu") == LoraLimits(2, 256, MIB)
    directory = make_model(tmp_path / "model", TinyModel())
    executor = LlmExecutor.load(directory, kv_pages=8, lora=None, self_check=False)
    assert not executor.capabilities().supports_lora and executor.adapters is None
