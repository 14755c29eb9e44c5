"""Makes small random LoRA adapters in PEFT's layout, and models with their weights merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, model: Path, seed: int, *, rank: int = 4) -> Path:
    """Writes an adapter of all projections of a model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in model_weights(model).items():
        if name.removesuffix(".weight").rpartition(".")[2] in MODULES:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{prefix}.lora_{kind}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8.0, "target_modules": list(MODULES)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Writes the model whose weights are W + alpha / r * B A."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    added = load_file(adapter / "adapter_model.safetensors")
    weights = model_weights(model)
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in added:
            a, b = (added[f"{prefix}.lora_{kind}.weight"].double() for kind in "AB")
            merged = weights[name].double() + config["lora_alpha"] / config["r"] * (b @ a)
            weights[name] = merged.to(weights[name].dtype)
    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def model_weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files of a model."""
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
