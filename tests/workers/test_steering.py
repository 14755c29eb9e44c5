"""Steering vectors: against the transformers library with hooks behind its layers, and in any company."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import quire
import torch
from quire.v1 import types_pb2
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.adapter_factory import make_adapter
from tests.gateway_process import GatewayProcess
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, float32_losses, hf_model, make_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import new_packer, poisoned_pages, random_texts, rows_in_chunks
from tests.workers.test_lora_model import LENGTHS, TEXT_SLOTS, adapter, load, logits_of
from workers.adapters.adapter import read_adapter
from workers.adapters.errors import AdapterError
from workers.models.lora import Adaptable
from workers.models.steering import SteeringTable

# With norms before sublayers only, before and behind them, with experts, and with layers of one sublayer, of
# which several follow the last that reads other rows, or none.
FAMILIES = (
    *("llama with biases", "gemma2", "qwen3_moe with dense layers", "nemotron_h"),
    "nemotron_h without an mlp at its end",
)
STEERED = (0, 2)
Vectors = Mapping[int, torch.Tensor]


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


def vectors_of(shape: tuple[int, int] | None, seed: int) -> Vectors:
    """For about half of the layers, as large as what layers add."""
    assert shape is not None
    layers, width = shape
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    chosen = [layer for layer in range(layers) if dice.random() < 0.5] or [layers - 1]
    return {layer: torch.randn(width, generator=generator) for layer in chosen}


def hooked(directory: Path, vectors: Vectors) -> Any:
    """The library's model, which adds them to the outputs of its layers."""
    model = copy.deepcopy(hf_model(directory))

    def adding(vector: torch.Tensor) -> Callable[..., Any]:
        def hook(_module: object, _inputs: object, output: Any) -> Any:
            return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

        return hook

    for layer, vector in vectors.items():
        model.model.layers[layer].register_forward_hook(adding(vector))
    return model


def test_rows_are_the_librarys(made: Path) -> None:
    """In random chunks, beside rows without one and those of a LoRA adapter."""
    decoder = load(made)
    vectors = {slot: vectors_of(decoder.adaptable().steering_shape, slot) for slot in STEERED}
    for slot in STEERED:
        decoder.set_lora(slot, decoder.pack_lora({}, vectors[slot]))
    decoder.set_lora(4, decoder.pack_lora(adapter(decoder, 4)))
    texts, kv = random_texts(2, LENGTHS), poisoned_pages(decoder)
    found = rows_in_chunks(decoder, texts, kv, new_packer(1), random.Random(1), lora_slots=TEXT_SLOTS)
    for text, slot, rows in zip(texts, TEXT_SLOTS, found, strict=True):
        if slot in STEERED:
            model = hooked(made, vectors[slot])
            with torch.inference_mode():
                expected = model(torch.tensor([text]), use_cache=False).logits[0]
            bound = 2 * float32_losses(model, [text], with_states=False)[0, 0]
            for (_, position), row in rows.items():
                assert (row - expected[position]).abs().max() < bound, (slot, position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_nothing_else_in_the_batch(made: Path, dtype: torch.dtype) -> None:
    need_compiled()
    decoder, texts = load(made, dtype), random_texts(4, LENGTHS)
    plain = logits_of(decoder, texts, (-1,) * len(texts))
    for slot in STEERED:
        decoder.set_lora(slot, decoder.pack_lora({}, vectors_of(decoder.adaptable().steering_shape, slot)))
    assert_same_bits(decoder, texts, made.name, lora_slots=TEXT_SLOTS)
    found = logits_of(decoder, texts, TEXT_SLOTS)
    for slot, row, expected in zip(TEXT_SLOTS, found, plain, strict=True):
        assert torch.equal(row, expected) == (slot not in STEERED)


def write(directory: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "STEERING_VECTOR", **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def test_the_rows_of_a_prompt_share_their_vectors() -> None:
    """It has thousands of rows, and each a vector for each layer."""

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        size = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            self.size = max(self.size, result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    table = SteeringTable(3)
    table.set(1, torch.ones(36, 64))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        steered = table.rows(torch.ones(4000, dtype=torch.int32))
        assert steered is not None
        steered.of(torch.arange(0, 4000, 2))
    assert largest.size <= 4000


SHAPE = (2, 64)
STEERABLE = Adaptable(steering_shape=SHAPE)
ONES = torch.ones(64)


def test_a_directory_is_read_with_its_strength(tmp_path: Path) -> None:
    write(tmp_path, {"direction.1": ONES.bfloat16()}, strength=-1.5, base_model_name_or_path="any")
    read = read_adapter(tmp_path, STEERABLE, max_rank=1, max_bytes=1 << 20)
    assert read.rank == 0 and not read.weights and [*read.steering] == [1]
    assert torch.equal(read.steering[1], -1.5 * ONES)


@pytest.mark.parametrize(
    ("tensors", "settings", "why"),
    [
        ({"direction.2": ONES}, {}, "direction.2: the model's last layer is 1"),
        ({"direction.01": ONES}, {}, "direction.01: is not a direction.N"),
        ({"direction.1": ONES[1:]}, {}, r"must be \[64\] of numbers, got F32 \[63\]"),
        ({"direction.1": ONES[None]}, {}, r"must be \[64\] of numbers, got F32 \[1, 64\]"),
        ({"direction.1": ONES.int()}, {}, r"must be \[64\] of numbers, got I32"),
        ({"direction.1": ONES * float("inf")}, {}, "is not finite"),
        ({"direction.1": ONES * 1e30}, {"strength": 1e12}, "is not finite"),
        ({"direction.1": ONES}, {"strength": "2"}, "strength: must be a number"),
        ({"direction.1": ONES}, {"alpha": 2}, "alpha: is not known of a steering vector"),
        ({}, {}, "has no tensor direction.N"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, tensors: Mapping[str, torch.Tensor], settings: dict[str, Any], why: str
) -> None:
    write(tmp_path, tensors, **settings)
    with pytest.raises(AdapterError, match=why):
        read_adapter(tmp_path, STEERABLE, max_rank=1, max_bytes=1 << 20)


def test_where_none_can_be_and_where_they_are_too_large(tmp_path: Path) -> None:
    write(tmp_path, {"direction.1": ONES})
    with pytest.raises(AdapterError, match="need a native model on a CPU"):
        read_adapter(tmp_path, Adaptable(), max_rank=1, max_bytes=1 << 20)
    with pytest.raises(AdapterError, match="needs 1 MiB, and 0 MiB are allowed"):
        read_adapter(tmp_path, STEERABLE, max_rank=1, max_bytes=511)


def test_32_in_one_step_and_after_a_kill(tmp_path: Path) -> None:
    """Beside LoRA and none. Each cache has the tokens of its own vectors, also when its KV was lost."""
    model = make_model(tmp_path / "model", TinyModel())
    names = [f"v{seed}" for seed in range(32)]
    sources, tokens = {}, {}
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    for seed, name in enumerate(names):
        vectors = {layer: 20 * vector for layer, vector in vectors_of(SHAPE, seed).items()}
        tensors = {f"direction.{layer}": 2 * vector for layer, vector in vectors.items()}
        sources[name] = write(tmp_path / name, tensors, strength=0.5)
        tokens[name] = greedy(hooked(model, vectors), prompt)
    sources["lora"] = make_adapter(tmp_path / "lora", model, 1)
    flags = ["--dtype", "float32", "--kv-pages", "256", "--max-lora-adapters", "33"]
    with GatewayProcess(model=str(model), flags=flags) as gateway, quire.Client(gateway.address) as client:
        for name, source in sources.items():
            client.load_adapter(name, str(source))
        for is_killed in (False, True):
            caches = {name: client.prefill(prompt, adapter_id=name) for name in (*sources, "")}
            if is_killed:
                (worker,) = gateway.status().workers
                os.kill(worker.pid, signal.SIGKILL)
            made = {name: [cache.output.token_id] for name, cache in caches.items()}
            for _ in range(5):
                found = client.batch_decode([(caches[name], made[name][-1]) for name in caches])
                for name, output in zip(caches, found, strict=True):
                    assert isinstance(output, types_pb2.StepOutput)
                    made[name].append(output.token_id)
            assert {name: made[name] for name in names} == tokens
            assert len({tuple(made[name]) for name in names}) > 25, "they make a difference"
            assert made[""] == greedy(hf_model(model), prompt)
            for cache in caches.values():
                cache.release()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    found: list[int] = []
    with torch.inference_mode():
        for _ in range(6):
            logits = model(torch.tensor([prompt + found]), use_cache=False).logits[0, -1]
            found.append(int(logits.argmax()))
    return found
