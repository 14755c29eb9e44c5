"""Adapters that PEFT wrote are read as PEFT reads them."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForConditionalGeneration, PreTrainedModel

from tests.families import MODELS, seeing_config, settings_of, some
from tests.model_factory import hf_model, load_decoder, make_adapter, make_family_model, peft_model
from workers.adapters import tensors
from workers.adapters.adapter import Adapter, identity, read_adapter
from workers.adapters.errors import AdapterError
from workers.models.lora import Adaptable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The experts of these are changed when PEFT reads an adapter: see `test_adapters_of_experts`.
WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe with dense layers", "qwen3_next"),
    *("qwen3_5 with experts", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
# Of the first family more, since what differs between the others is the names of their modules.
ADAPTERS, FEW_ADAPTERS = 8, 2
FULL_NAMES = ["model.layers.1.self_attn.o_proj", "layers.3.self_attn.o_proj"]
# How people name modules in rank_pattern and alpha_pattern.
PATTERNS = [
    "{}",
    "self_attn.{}",
    "layers.1.self_attn.{}",
    "model.layers.2.mlp.{}",
    "^model.layers.0.self_attn.{}",
    r"layers\.[02]\.(mlp|self_attn)\.{}",
    r".*\.{}",
    r"layers\.\d+\.self_attn\.(?!k).*_proj",
    "model.layers.3.*",
]


# Of the same names: one projection and several, and experts. Those of the others are among these.
NAMED = ("llama with biases", "qwen3_moe with dense layers", "phi3")


@pytest.fixture
def llama(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama")


def projections(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of each projection of a model's attention and MLPs."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name and not name.endswith("_gate")
    }


def read(directory: Path, model: Path, **limits: int) -> Adapter:
    modules = projections(hf_model(model))
    bounds: dict[str, Any] = {"max_rank": 256, "max_bytes": 1 << 30} | limits
    return read_adapter(directory, Adaptable(modules), **bounds)


def assert_read_as_peft_does(adapter: Adapter, directory: Path, model: Path) -> None:
    """Compares all projections of the model, with the adapter merged into them in float64.

    B times its scale is rounded to float32 once, by up to 2^-24 of it. All else is exact but for the rounding
    of float64: of r products, their sum and the sum with the weight.
    """
    merged = peft_model(model, directory).double().merge_and_unload()
    for name in projections(hf_model(model)):
        expected = merged.get_parameter(f"{name}.weight")
        found = hf_model(model).get_parameter(f"{name}.weight").double()
        bound = torch.zeros_like(found)
        if name in adapter.weights:
            pair = adapter.weights[name]
            a, b = pair.a.double(), pair.b.double()
            assert pair.a.dtype == pair.b.dtype == torch.float32
            bound = (2**-24 + len(a) * 2**-52) * (b.abs() @ a.abs()) + 2**-52 * found.abs()
            found = found + b @ a
        assert (found - expected).abs().le(bound).all(), name


def random_settings(dice: random.Random, model: str, leaves: list[str]) -> dict[str, Any]:
    """Of a LoraConfig."""
    some = dice.sample(leaves, dice.randint(1, len(leaves)))
    attention = "(q_proj|o_proj|qkv_proj)" if model in WITH_EXPERTS else f"({'|'.join(some)})"
    targets: list[Any] = [some, some, [*some, *FULL_NAMES], rf".*layers\.[0-2]\.\w+\.{attention}"]
    targets.append(rf"(?!.*layers\.1\.)(?:model\.)?layers\.\d{{1,}}\.(?:self_attn|mlp)\.{attention}")
    settings = {
        "r": dice.randint(1, 256),
        "lora_alpha": dice.choice([1, 16, 33.25, 0.1]),
        "use_rslora": dice.random() < 0.5,
        "target_modules": dice.choice(targets if model in WITH_EXPERTS else [*targets, "all-linear"]),
        "exclude_modules": dice.choice([None, None, some[:1], rf".*\.1\..*\.{some[0]}"]),
    }
    if isinstance(settings["target_modules"], list) and dice.random() < 0.4:
        settings["layers_to_transform"] = dice.choice([2, [0, 3], [1]])
        settings["layers_pattern"] = dice.choice([None, "layers", ["h", "layers"]])
    for name, values in (("rank_pattern", (1, 256)), ("alpha_pattern", (1, 99))):
        chosen = dice.sample(PATTERNS, dice.choice([0, 0, 1, 4]))
        # The first that matches counts, and PEFT sorts them when it saves.
        settings[name] = dict(
            sorted((pattern.format(dice.choice(leaves)), dice.randint(*values)) for pattern in chosen)
        )
    return settings


@pytest.mark.parametrize("name", some(MODELS, NAMED))
def test_random_adapters_of_all_families(tmp_path: Path, name: str, model_of: Callable[[str], Path]) -> None:
    model, dice = model_of(name), random.Random(name)
    modules = projections(hf_model(model))
    leaves = sorted({module.split(".")[-1] for module in modules if "self_attn" in module})
    if name not in WITH_EXPERTS:
        leaves = sorted({module.split(".")[-1] for module in modules})
    ranks = set()
    count = ADAPTERS if name == "llama" else FEW_ADAPTERS
    for seed in range(count):
        directory = tmp_path / str(seed)
        while not directory.exists():
            with contextlib.suppress(ValueError):  # No module is left.
                make_adapter(directory, model, seed=seed, **random_settings(dice, name, leaves))
        adapter = read(directory, model)
        assert_read_as_peft_does(adapter, directory, model)
        ranks |= {len(pair.a) for pair in adapter.weights.values()}
        assert adapter.rank == max(len(pair.a) for pair in adapter.weights.values())
    assert len(ranks) > count // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype(tmp_path: Path, llama: Path, dtype: str) -> None:
    directory = make_adapter(tmp_path, llama, dtype=dtype, r=5, lora_alpha=7, target_modules=["q_proj"])
    stored = load_file(directory / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    assert_read_as_peft_does(read(directory, llama), directory, llama)


def test_a_part_of_a_tensor_at_a_time(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, llama, r=5, lora_alpha=7, target_modules=["down_proj"])
    monkeypatch.setattr("workers.models.checkpoint.PART_BYTES", 500)
    assert_read_as_peft_does(read(tmp_path, llama), tmp_path, llama)


def test_a_converted_pissa_adapter_is_plain_lora(tmp_path: Path, llama: Path) -> None:
    """PEFT saves what training added to the changed initial weights, as an adapter of twice the rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.model_factory import quietly

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = quietly(get_peft_model, AutoModelForCausalLM.from_pretrained(llama), config)
    quietly(model.save_pretrained, str(tmp_path / "initial"))
    with pytest.raises(AdapterError, match="init_lora_weights: pissa changes the weights of the model"):
        read(tmp_path / "initial", llama)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    converted = tmp_path / "converted"
    quietly(
        model.save_pretrained,
        str(converted),
        path_initial_model_for_weight_conversion=str(tmp_path / "initial"),
    )
    adapter = read(converted, llama)
    assert adapter.rank == 8
    assert_read_as_peft_does(adapter, converted, llama)


def test_the_adapter_of_a_model_that_also_sees(tmp_path: Path) -> None:
    """That of the text is applied, under the names of old and of new checkpoints; that of images is not."""
    whole: PreTrainedModel = Gemma3ForConditionalGeneration(seeing_config())
    make_adapter(tmp_path, whole, r=3, target_modules=["q_proj", "up_proj", "fc1"])
    stored = load_file(tmp_path / WEIGHTS)
    assert any(".vision_tower." in name for name in stored)
    text = make_family_model(tmp_path / "text", *settings_of("gemma3"))
    modules = projections(hf_model(text))
    limits: dict[str, Any] = {"max_rank": 256, "max_bytes": 1 << 30}
    adapter = read_adapter(tmp_path, Adaptable(modules), **limits)
    assert adapter.weights.keys() == {name for name in modules if name.endswith(("q_proj", "up_proj"))}
    for name, pair in adapter.weights.items():
        in_file = f"base_model.model.{name.replace('model.', 'model.language_model.', 1)}"
        assert torch.equal(pair.a, stored[f"{in_file}.lora_A.weight"])
    in_file = "model.language_model.layers.2.self_attn.q_proj"
    save_file({name: tensor for name, tensor in stored.items() if in_file not in name}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match=f"names module {in_file}, which has no tensors"):
        read_adapter(tmp_path, Adaptable(modules), **limits)
    older = {
        name.replace(".model.language_model.", ".language_model.model."): tensor.clone()
        for name, tensor in stored.items()
    }
    save_file(older, tmp_path / WEIGHTS)
    again = read_adapter(tmp_path, Adaptable(modules), **limits)
    assert again.weights.keys() == adapter.weights.keys()
    save_file(stored | older, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="is there twice, under different names"):
        read_adapter(tmp_path, Adaptable(modules), **limits)


def test_the_adapter_of_a_model_with_other_names(tmp_path: Path) -> None:
    """Native code has the layers of Mamba under the names of other families."""
    model = make_family_model(tmp_path / "model", *settings_of("mamba"))
    make_adapter(tmp_path, model, r=3, target_modules=["in_proj", "x_proj"])
    stored = load_file(tmp_path / WEIGHTS)
    modules = load_decoder(model).adaptable().modules
    adapter = read_adapter(tmp_path, Adaptable(modules), max_rank=256, max_bytes=1 << 30)
    assert adapter.weights.keys() == {name for name in modules if name.endswith(("in_proj", "x_proj"))}
    for name, pair in adapter.weights.items():
        in_file = name.replace("model.", "base_model.model.backbone.", 1)
        assert torch.equal(pair.a, stored[f"{in_file}.lora_A.weight"])


def test_the_name_of_an_adapter_in_memory_may_be_in_the_file(tmp_path: Path, llama: Path) -> None:
    make_adapter(tmp_path, llama, r=3, target_modules=["v_proj"])
    before = read(tmp_path, llama)
    stored = load_file(tmp_path / WEIGHTS)
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in stored.items()}
    save_file(named, tmp_path / WEIGHTS)
    adapter = read(tmp_path, llama)
    assert all(torch.equal(adapter.weights[name].b, pair.b) for name, pair in before.weights.items())
    assert_read_as_peft_does(adapter, tmp_path, llama)


def test_a_snapshot_of_the_hub_links_to_its_files(tmp_path: Path, llama: Path) -> None:
    blobs = make_adapter(tmp_path / "blobs", llama, r=3, target_modules=["v_proj"])
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(Path("..") / "blobs" / name)
    assert read(snapshot, llama).identity == identity(snapshot) == identity(blobs)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_change_is_noticed(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between two reads by its identity, and during one by the read itself."""
    make_adapter(tmp_path, llama, r=3, target_modules=["v_proj"])
    before = identity(tmp_path)
    assert read(tmp_path, llama).identity == before == identity(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / "new").write_bytes(content)
    (tmp_path / "new").replace(tmp_path / name)
    assert identity(tmp_path) != before

    original, is_first = tensors.read_pairs, [True]

    def while_reading(module: str, pair: tensors.PairEntries, scale: float) -> object:
        found = list(original(module, pair, scale))
        if is_first.pop() if is_first else False:
            status = (tmp_path / name).stat()
            os.utime(tmp_path / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        return found

    monkeypatch.setattr("workers.adapters.adapter.read_pairs", while_reading)
    with pytest.raises(AdapterError, match="changed while"):
        read(tmp_path, llama)


def test_settings_of_training_do_not_matter(tmp_path: Path, llama: Path) -> None:
    make_adapter(tmp_path, llama, r=3, target_modules=["v_proj"], lora_dropout=0.1)
    settings = json.loads((tmp_path / CONFIG).read_text())
    added = {"corda_config": {"verbose": True}, "auto_mapping": {"a": 1}, "an_option_of_tomorrow": False}
    (tmp_path / CONFIG).write_text(json.dumps(settings | added))
    read(tmp_path, llama)
