"""Quantised models as they are on a GPU: loaded, checked and computed, against their dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import gpu_format
from kernels.gpu_weight import GpuWeight
from kernels.linear import DenseWeight
from kernels.permuted_weight import PermutedWeight
from kernels.stacked_weight import StackedWeight
from kernels.weight import Weight
from tests import quantised_directories as make
from tests.families import settings_of
from tests.gguf_files import write_gguf
from tests.gpu.sizes import FirstTiles
from tests.kernels.conftest import INTERPRETED
from tests.model_factory import TinyModel, make_family_model, make_model
from tests.workers.packing import HandPacker, HandSequence, Item, poison
from tests.workers.test_gguf_models import Q4_K_M
from tests.workers.test_quantised_ranks import plain
from workers.models.builder import build_decoder
from workers.models.decoder import Decoder
from workers.models.lora import LoraPair
from workers.models.model import new_pages
from workers.models.native_parity_check import check_native
from workers.models.weights import LoadPlan, load_planned, plan_load

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of a GPU: tests/gpu/test_quantised.py")
CPU = torch.device("cpu")


# Few programs: each takes milliseconds in the interpreter.
SMALL = TinyModel(vocab_size=48, intermediate_size=64, num_layers=1, heads=2, kv_heads=1)
WIDE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
}


def written(directory: Path, write: Callable[[Path], object]) -> Path:
    make_model(directory, SMALL)
    write(directory)
    return directory


def experts(path: Path) -> Path:
    model_type, settings = settings_of("qwen3_moe")
    sizes = WIDE | {"num_experts": 3, "moe_intermediate_size": 32}
    return make_family_model(path / "experts", model_type, settings | sizes)


def latents(path: Path) -> Path:
    model_type, settings = settings_of("deepseek_v3")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "v_head_dim": 32, "q_lora_rank": 32}
    sizes = {"num_hidden_layers": 2, "qk_rope_head_dim": 16, "moe_intermediate_size": 32}
    return make_family_model(path / "latents", model_type, settings | heads | sizes)


def apart(name: str) -> str:
    return "q8_0" if "up_proj" in name else "q4_0"


# Fused projections of several formats and of none, an order of inputs, a tied head, and experts.
MODELS: dict[str, Callable[[Path], tuple[Path, str | None]]] = {
    "Q4_K_M": lambda path: (write_gguf(path / "model.gguf", plain(path, **WIDE), Q4_K_M), None),
    "gptq in another order": lambda path: (
        written(path, lambda made: make.gptq(made, ordered=True, symmetric=False)),
        None,
    ),
    "float8 in part": lambda path: (written(path, lambda made: make.float8(made, left=["v_proj"])), None),
    "q8_0": lambda path: (make_model(path, replace(SMALL, tied=True)), "q8_0"),
    "experts": lambda path: (write_gguf(path / "model.gguf", experts(path), apart), None),
    "latents": lambda path: (latents(path), "q8_0"),
}


# Of experts others find nearly the same: test_gpt_oss_cuda.py and test_quantised_experts_cuda.py.
@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.thorough) if name == "experts" else name for name in MODELS]
)
def plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadPlan:
    """In the memory of the CPU, as a GPU has it: kernels are interpreted there."""
    monkeypatch.setattr(gpu_format, "is_gpu", lambda _: True)
    directory, quantization = MODELS[request.param](tmp_path)
    return plan_load(directory, "float32", quantization=quantization)


def leaves(weight: Weight) -> list[Weight]:
    if isinstance(weight, StackedWeight):
        return [each for part in weight.parts for each in leaves(part)]
    return leaves(weight.within) if isinstance(weight, PermutedWeight) else [weight]


def dequantised(plan: LoadPlan, quantised: Decoder) -> Decoder:
    """The same model with dense weights, which have been read from the quantised ones."""
    made = build_decoder(plan.config, torch.float32, CPU)
    sources = quantised.targets()
    for name, target in made.targets().items():
        source = sources[name]
        if source.is_plain:
            target.tensor.copy_(source.tensor)
        else:
            rows = torch.arange(source.first, source.first + target.shape[0])
            target.tensor.copy_(source.into.rows(rows))
    return made


def logits(decoder: Decoder, *, batch_invariant: bool = False, adapted: bool = False) -> torch.Tensor:
    """Of a prompt of more than 16 rows, and then of decodes of one and of three texts."""
    if adapted:
        decoder.allocate_lora(1, 4)
        generator = torch.Generator().manual_seed(2)
        shapes = decoder.adaptable().modules
        pairs = {
            name: LoraPair(
                torch.randn(4, inputs, generator=generator), torch.randn(outputs, 4, generator=generator) / 30
            )
            for name, (outputs, inputs) in shapes.items()
        }
        decoder.set_lora(0, decoder.pack_lora(pairs))
    decoder.batch_invariant = batch_invariant
    kv, packer = new_pages(decoder, 12), HandPacker(16, range(12))
    poison(kv)
    slot = 0 if adapted else -1
    texts = [HandSequence(lora_slot=slot) for _ in range(3)]
    steps = [[Item(texts[0], range(1, 20), range(19))], [Item(texts[0], [3], [0])]]
    steps.append([Item(text, [5 + index], [0]) for index, text in enumerate(texts)])
    return torch.cat(
        [decoder.logits(decoder.forward(packer.pack(items).to(kv.device), kv)) for items in steps]
    )


def test_a_model_computes_as_its_dequantised_weights_do(plan: LoadPlan) -> None:
    source = load_planned(plan)[0]
    dense = dequantised(plan, source)
    kinds = {type(leaf) for target in source.targets().values() for leaf in leaves(target.into)}
    assert kinds == {GpuWeight, DenseWeight}
    decoder, description = load_planned(plan, pack=True)
    decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
    expected = logits(dense)
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-4, atol=1e-4)
    assert description.quantization == plan.format_names
    # Bytes are those of the memory that the weights have.
    targets = source.targets().values()
    assert plan.weight_bytes == sum(target.nbytes for target in targets) == description.weight_bytes


@pytest.mark.parametrize("plan", ["gptq in another order"], indirect=True)
def test_adapters_and_the_same_bits(plan: LoadPlan) -> None:
    decoder, _ = load_planned(plan, pack=True)
    dense = dequantised(plan, load_planned(plan)[0])
    torch.testing.assert_close(
        logits(decoder, adapted=True), logits(dense, adapted=True), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "plan",
    [name if name == "q8_0" else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS],
    indirect=True,
)
def test_a_model_proves_itself(plan: LoadPlan, tmp_path: Path) -> None:
    """In float32, in which nothing is rounded: as near as a dense model has to be."""
    directory = next(tmp_path.glob("*.gguf"), tmp_path)
    check_native(directory, plan.config, torch.float32, CPU, quantization=plan.quantization, forms=plan.forms)
