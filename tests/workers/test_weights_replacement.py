"""Weights that are read beside those that are served, and put into place."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.families import MODELS, settings_of, some
from tests.model_factory import TinyModel, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages
from workers.executors.llm import LlmExecutor
from workers.executors.memory import LoraLimits
from workers.executors.replacement import WeightsReplacement
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.model import ModelDescription
from workers.models.registry import FAMILIES
from workers.models.weights import copy_weights
from workers.operations import Failed, ReplacementRead, WeightsRead
from workers.runners.eager import EagerRunner

PATIENCE_S = 60
# A model of each family whose layers compute something of their weights once.
DERIVING = {
    model_type: name
    for name, (model_type, _) in MODELS.items()
    if FAMILIES[model_type].recurrent is not None or "kv_lora_rank" in FAMILIES[model_type].reads
}
# Each kind of what is computed.
ALWAYS = ("deepseek_v3", "lfm2", "falcon_mamba", "falcon_h1")


def test_cancelled_replacements_are_not_in_memory_together() -> None:
    """A caller that starts and cancels again and again must not fill the memory."""
    mutex, reading, begun = threading.Lock(), [0], [0]
    most = 0
    released = threading.Event()

    def read(_: Path) -> tuple[str, ModelDescription]:
        nonlocal most
        with mutex:
            reading[0] += 1
            begun[0] += 1
            most = max(most, reading[0])
        released.wait(PATIENCE_S)
        with mutex:
            reading[0] -= 1
        raise OSError

    submitted: queue.SimpleQueue[ReplacementRead] = queue.SimpleQueue()
    replacement = WeightsReplacement(read, lambda _weights, _description: None)
    replacement.submit = submitted.put
    for op_id in range(1, 9):
        replacement.read(op_id, "weights")
        while op_id == 1 and not begun[0]:
            time.sleep(0.001)
        if op_id < 8:
            replacement.discard()
    released.set()
    answers = [replacement.was_read(submitted.get(timeout=PATIENCE_S)) for _ in range(2)]
    assert most == 1
    assert begun[0] == 2, "those that nobody wants any more are not begun"
    assert answers[0] == ()
    (failed,) = answers[1]
    assert isinstance(failed, Failed) and failed.op_id == 8


def test_what_is_read_after_it_was_discarded_is_discarded_again() -> None:
    """Other ranks may have begun to read it only then."""
    is_read, may_end, discarded = threading.Event(), threading.Event(), list[bool]()
    submitted: queue.SimpleQueue[ReplacementRead] = queue.SimpleQueue()

    def read(_: Path) -> tuple[str, ModelDescription]:
        is_read.set()
        assert may_end.wait(PATIENCE_S)
        raise OSError

    replacement = WeightsReplacement(read, lambda _weights, _description: None)
    replacement.submit = submitted.put
    replacement.on_discard = lambda: discarded.append(may_end.is_set())
    replacement.read(1, "weights")
    assert is_read.wait(PATIENCE_S)
    replacement.discard()
    may_end.set()
    assert replacement.was_read(submitted.get(timeout=PATIENCE_S)) == ()
    assert discarded == [False, False, True]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_replaced_weights_leave_the_memory(tmp_path: Path, backend: str) -> None:
    """Also the first ones: a worker never holds more than two models, and one of them only while it reads."""
    models = [make_model(tmp_path / f"{seed}", TinyModel(seed=seed)) for seed in range(3)]
    lora = LoraLimits(max_adapters=2, max_rank=4, max_bytes=1 << 20)
    executor = LlmExecutor.load(models[0], kv_pages=8, lora=lora, backend=backend, self_check=False)
    replacement, runner = executor.replacement, executor.engine.runner
    assert replacement is not None and isinstance(runner, EagerRunner)
    reads: queue.Queue[ReplacementRead] = queue.Queue()
    replacement.submit = reads.put
    for op_id, source in enumerate(models[1:], start=1):
        old = weakref.ref(runner._model)
        replacement.read(op_id, str(source))
        (answer,) = replacement.was_read(reads.get(timeout=PATIENCE_S))
        assert isinstance(answer, WeightsRead), answer
        replacement.apply()
        assert old() is None
        assert executor.info().fingerprint == answer.model.fingerprint


def random_decoder(config: ModelConfig, seed: int) -> Decoder:
    """In float16, for which a CPU has no packed weights: they stay where they are, as on a GPU."""
    made, generator = build_decoder(config, torch.float16, "cpu"), torch.Generator().manual_seed(seed)
    for target in made.targets().values():
        values = torch.randn(target.tensor.shape, generator=generator)
        target.tensor.copy_(values * 0.1 + (values.dim() == 1))
    return made


def logits_of(decoder: Decoder) -> torch.Tensor:
    packer, kv, sequence = new_packer(1), poisoned_pages(decoder), HandSequence()
    steps = ([5, 3, 8], [7])
    return torch.cat([packer.run(decoder, [Item(sequence, tokens)], kv) for tokens in steps])


@pytest.mark.parametrize("model_type", some(DERIVING, ALWAYS))
def test_weights_that_are_copied_into_place_are_used(model_type: str) -> None:
    """By a model that has run before."""
    kind, settings = settings_of(DERIVING[model_type])
    if "first_k_dense_replace" in settings:
        settings["first_k_dense_replace"] = settings["num_hidden_layers"]
    config = ModelConfig.from_settings(AutoConfig.for_model(kind, **settings).to_dict())
    served, other = (random_decoder(config, seed) for seed in (1, 2))
    if not any(layer.sparse for layer in config.layers):  # of experts, routers in float32 are packed
        served.pack()
    before, expected = logits_of(served), logits_of(other)
    copy_weights(other, served)
    assert torch.equal(logits_of(served), expected) and not torch.equal(before, expected)
