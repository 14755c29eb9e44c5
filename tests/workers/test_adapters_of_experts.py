"""Adapters of experts, routers and of DoRA against PEFT, in all layouts of their files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import MODELS, some
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import (
    float32_losses,
    load_decoder,
    make_adapter,
    peft_model,
)
from tests.workers.packing import random_texts
from tests.workers.test_lora_model import LENGTHS, MAX_RANK, adapter, logits_of
from workers.adapters.adapter import Adapter, read_adapter
from workers.adapters.errors import AdapterError
from workers.models.decoder import Decoder
from workers.models.lora import LoraPair, LoraWeights
from workers.models.registry import FAMILIES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WITH_EXPERTS = [
    name
    for name, (family, settings) in MODELS.items()
    if FAMILIES[family].experts is not None and settings.get("num_local_experts") != 0
]
# One with both kinds of layers, one whose outputs of gate and up take turns, one with names of its own.
FEW = ("qwen3_moe with dense layers", "gpt_oss", "mixtral")
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(params=some(WITH_EXPERTS, FEW))
def made(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


@pytest.fixture
def qwen(model_of: Callable[[str], Path]) -> Path:
    return model_of("qwen3_moe")


def load(directory: Path, slots: int = 2, **settings: Any) -> Decoder:
    decoder = load_decoder(directory, pack=True, **settings)
    decoder.allocate_lora(slots, MAX_RANK)
    return decoder


def read(directory: Path, decoder: Decoder, **limits: int) -> Adapter:
    bounds: dict[str, Any] = {"max_rank": MAX_RANK, "max_bytes": 1 << 30} | limits
    return read_adapter(directory, decoder.adaptable(), **bounds)


def assert_computes_as_peft(decoder: Decoder, weights: LoraWeights, model: Path, directory: Path) -> None:
    """Each product may lose what `float32_losses` says, and here each is a sum of two."""
    decoder.set_lora(1, decoder.pack_lora(weights))
    texts = random_texts(3, (30, 17))
    adapted = peft_model(model, directory)
    with torch.inference_mode():
        expected = [adapted(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    bounds = 2 * float32_losses(adapted.merge_and_unload(), texts, with_states=False)
    found, plain = (logits_of(decoder, texts, (slot,) * len(texts)) for slot in (1, -1))
    for ours, theirs, without, (bound,) in zip(found, expected, plain, bounds, strict=True):
        assert (ours - theirs).abs().max() < bound
        assert (without - theirs).abs().max() > 100 * bound, "the adapter makes no difference"


def assert_adds_as_peft(decoder: Decoder, weights: LoraWeights, model: Path, directory: Path) -> None:
    """What is added to the matrices of all experts. B times its scale is rounded to float32 once."""
    merged, base = peft_model(model, directory).double().merge_and_unload(), peft_model(model, directory)
    for parameter, stack in decoder.adaptable().stacks.items():
        if len(stack.modules) == 1 or stack.modules[0][0] not in weights:
            continue
        before: Any = base.get_base_model().get_submodule(parameter.rpartition(".")[0])
        before = before.get_base_layer()
        old = getattr(before, parameter.rpartition(".")[2]).double()
        for expert, names in enumerate(stack.modules):
            pairs = [weights[name] for name in names]
            added, size = (
                [matrix(pair.b.double()) @ matrix(pair.a.double()) for pair in pairs]
                for matrix in (torch.clone, torch.abs)
            )
            join = (lambda parts: torch.stack(parts, 1).flatten(0, 1)) if stack.interleaved else torch.cat
            new, was = merged.get_parameter(parameter)[expert], old[expert]
            if getattr(before, "is_transposed", False):
                new, was = new.T, was.T
            bound = (2**-24 + len(pairs[0].a) * 2**-52) * join(size) + 2**-51 * was.abs()
            assert (was + join(added) - new).abs().le(bound).all(), (parameter, expert)


def random_settings(dice: random.Random) -> dict[str, Any]:
    """Of a LoraConfig."""
    parameters = dice.choice([PARAMETERS, PARAMETERS, PARAMETERS[:1], PARAMETERS[1:]])
    rank = dice.randint(1, 20)
    return {
        "r": rank,
        "lora_alpha": rank * dice.uniform(0.1, 0.3),
        "target_modules": dice.choice([[], ["q_proj"], ["o_proj", "q_proj"]]),
        "target_parameters": parameters,
        "rank_pattern": dice.choice([{}, {parameters[-1]: dice.randint(1, 40)}]),
        "alpha_pattern": dice.choice([{}, {r".*\.experts\.down_proj": 1.5}]),
    }


def test_stacked_parameters_of_random_settings(tmp_path: Path, made: Path) -> None:
    decoder, dice = load(made), random.Random(made.name)
    for seed in range(2):
        directory = make_adapter(tmp_path / str(seed), made, seed=seed, **random_settings(dice))
        weights = read(directory, decoder).weights
        assert_adds_as_peft(decoder, weights, made, directory)
        assert_computes_as_peft(decoder, weights, made, directory)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.thorough)])
def test_modules_of_each_expert(tmp_path: Path, name: str, model_of: Callable[[str], Path]) -> None:
    """As PEFT has saved them when the library had such modules. It still reads them."""
    model = model_of(name)
    decoder = load(model)
    weights, generator = {}, torch.Generator().manual_seed(1)
    leaves = set()
    for module, (outputs, inputs) in decoder.adaptable().modules.items():
        if ".experts." in module:
            a, b = (0.1 * torch.randn(*size, generator=generator) for size in ((3, inputs), (outputs, 3)))
            weights[module] = LoraPair(a, b)
            leaves.add(module.rpartition(".")[2])
    settings = {"r": 3, "lora_alpha": 3, "target_modules": sorted(leaves)}
    directory = write(tmp_path / "adapter", weights, **settings)
    found = read(directory, decoder).weights
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].b, pair.b) for name, pair in weights.items())
    assert_computes_as_peft(decoder, found, model, directory)
    some = {module: pair for module, pair in weights.items() if ".experts.2." not in module}
    with pytest.raises(AdapterError, match=r"names module .*experts\.2\..*, which has no tensors"):
        read(write(tmp_path / "some", some, **settings), decoder)


def write(directory: Path, weights: LoraWeights, **settings: Any) -> Path:
    """An adapter of modules."""
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", **settings}))
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": matrix.contiguous()
        for name, pair in weights.items()
        for part, matrix in (("A", pair.a), ("B", pair.b))
    }
    save_file(tensors, directory / WEIGHTS)
    return directory


def test_the_layout_of_vllm(tmp_path: Path, qwen: Path) -> None:
    """The same tensors. Its configs may name the experts as a module."""
    decoder = load(qwen)
    directory = make_adapter(tmp_path, qwen, r=3, target_modules=[], target_parameters=PARAMETERS)
    before = read(directory, decoder).weights
    settings = json.loads((directory / CONFIG).read_text())

    def named(**changes: Any) -> Adapter:
        (directory / CONFIG).write_text(json.dumps(settings | changes))
        return read(directory, decoder)

    for targets in (["experts"], ["gate_up_proj", "down_proj"]):
        weights = named(target_parameters=None, target_modules=targets).weights
        assert weights.keys() == before.keys()
        assert all(torch.equal(weights[name].b, pair.b) for name, pair in before.items())
    for changes, told in (
        ({"target_parameters": ["experts.gate_up_proj"]}, "base_layer has tensors, but none of its param"),
        ({"target_parameters": None, "target_modules": ["q_proj"]}, "experts.* has tensors, but none of its"),
        (
            {"target_parameters": [*PARAMETERS, "gate.weight"]},
            r"names parameter .*gate\.weight, which has no",
        ),
        ({"r": 4}, "the rank of module .*experts.gate_up_proj is 4, but that of its tensors is 3"),
    ):
        with pytest.raises(AdapterError, match=told):
            named(**changes)


def test_what_is_read_is_bounded_before_it_is_read(tmp_path: Path, qwen: Path) -> None:
    """By what kernels make of it: of rank 1 they fill up 16."""
    decoder = load(qwen)
    directory = make_adapter(tmp_path, qwen, r=1, target_modules=[], target_parameters=PARAMETERS)
    in_memory = decoder.pack_lora(read(directory, decoder).weights).bytes
    with pytest.raises(AdapterError, match="needs 1 MiB as float32"):
        read(directory, decoder, max_bytes=in_memory - 1)


@pytest.mark.parametrize(("name", "gate"), [("qwen3_moe", "mlp.gate"), ("qwen2_moe", "shared_expert_gate")])
def test_all_linear_has_the_router_and_the_gate_of_a_shared_expert(
    tmp_path: Path, name: str, gate: str, model_of: Callable[[str], Path]
) -> None:
    model = model_of(name)
    directory = make_adapter(tmp_path / "adapter", model, r=4, lora_alpha=0.5, target_modules="all-linear")
    decoder = load(model)
    weights = read(directory, decoder).weights
    assert any(module.endswith(gate) for module in weights)
    assert_computes_as_peft(decoder, weights, model, directory)


def test_32_adapters_in_a_step_of_32(qwen: Path) -> None:
    """A text has the bits that it has alone."""
    need_compiled()
    decoder = load(qwen, 32, dtype=torch.bfloat16)
    for slot in range(32):
        decoder.set_lora(slot, decoder.pack_lora(adapter(decoder, slot)))
    texts = random_texts(1, (1, 2, 5, 3) * 8)
    together = logits_of(decoder, texts, tuple(range(32)))
    assert all(
        torch.equal(logits_of(decoder, [text], (slot,))[0], rows)
        for slot, (text, rows) in enumerate(zip(texts, together, strict=True))
    )
    assert len({float(rows[0, 0]) for rows in together}) > 20, "they differ"


def test_without_compiled_kernels(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, texts = adapter(load(qwen), 1), random_texts(3, LENGTHS)
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr("kernels.cpu.linear.can_multiply", lambda _: False)
        decoder = load(qwen)
        decoder.set_lora(1, decoder.pack_lora(weights))
        found.append(torch.cat(logits_of(decoder, texts, (1, -1, 1, 1, 0))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4 * float(found[1].abs().max()))


# DoRA.


@pytest.fixture
def llama(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama with biases")


def make_dora(directory: Path, model: Path, **settings: Any) -> Path:
    """An adapter whose magnitudes differ from the norms at its beginning."""
    make_adapter(directory, model, r=5, lora_alpha=4, use_dora=True, **settings)
    tensors, generator = load_file(directory / WEIGHTS), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("magnitude_vector"):
            tensor.mul_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, directory / WEIGHTS)
    return directory


def test_dora(tmp_path: Path, llama: Path) -> None:
    """Biases are not scaled."""
    directory, decoder = make_dora(tmp_path, llama, target_modules="all-linear"), load(llama)
    weights = read(directory, decoder).weights
    assert_computes_as_peft(decoder, weights, llama, directory)


def test_dora_beside_others(tmp_path: Path, llama: Path) -> None:
    need_compiled()
    decoder = load(llama, 3, dtype=torch.bfloat16)
    dora = read(make_dora(tmp_path, llama, target_modules=["q_proj", "down_proj"]), decoder).weights
    decoder.set_lora(0, decoder.pack_lora(dora))
    decoder.set_lora(1, decoder.pack_lora(adapter(decoder, 1)))
    texts, slots = random_texts(2, LENGTHS), (0, -1, 1, 2, 0)
    together = logits_of(decoder, texts, slots)
    for text, slot, rows in zip(texts, slots, together, strict=True):
        assert torch.equal(logits_of(decoder, [text], (slot,))[0], rows)


def test_dora_of_quantised_weights_has_the_norms_of_these(tmp_path: Path, llama: Path) -> None:
    """As a model into whose dequantised weights it is merged."""
    decoder = load(llama, quantization="q4_0")
    directory = make_dora(tmp_path, llama, target_modules=["o_proj"])
    weights = read(directory, decoder).weights
    packed = decoder.pack_lora(weights)
    at = [name for name, _ in decoder.projections()].index("model.layers.2.self_attn.") + 1
    projection, pairs = decoder.projections()[at][1], packed.projections[at]
    pair = weights["model.layers.2.self_attn.o_proj"]
    changed = projection.weight.dense().double() + pair.b.double() @ pair.a.double()  # type: ignore[union-attr]
    assert pair.magnitude is not None
    torch.testing.assert_close(
        pairs.scales.double(),  # type: ignore[union-attr]
        pair.magnitude.double() / changed.norm(dim=1),
        rtol=1e-5,
        atol=0,
    )


def test_dora_is_refused_where_it_would_be_wrong(tmp_path: Path, qwen: Path, llama: Path) -> None:
    decoder = load(qwen)
    directory = make_adapter(tmp_path / "1", qwen, r=3, target_modules=[], target_parameters=PARAMETERS)
    tensors = load_file(directory / WEIGHTS)
    for name in [*tensors]:
        if "lora_B" in name:
            magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
            tensors[magnitude] = torch.ones(len(tensors[name]))
    save_file(tensors, directory / WEIGHTS)
    settings = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(AdapterError, match="use_dora: DoRA of experts is not supported"):
        read(directory, decoder)
    directory = make_dora(tmp_path / "2", llama, target_modules=["q_proj"])
    settings = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(settings | {"use_dora": False}))
    with pytest.raises(AdapterError, match=r"use_dora: module .*q_proj has a lora_magnitude_vector"):
        read(directory, load(llama))
