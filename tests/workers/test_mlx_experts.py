"""Experts of the library's families in directories of MLX, which names them in three ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import gguf_library
from tests import quantised_directories as make
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_model, make_family_model
from workers.executors.loading import AUTO, TRANSFORMERS, choose_backend, load_served
from workers.models.library.library_model import LibraryModel
from workers.models.library.packed_linear import PackedLinear
from workers.models.library.quantised_parts import QuantisedExperts

TEXT = [(5 * i + 2) % 97 for i in range(37)]
PLACES = {
    "afmoe": ".experts.", "dots1": ".experts.", "minimax_m2": ".switch_mlp.",
    "gemma4 with experts": ".experts.switch_glu.",
}  # fmt: skip
# Of gemma4, whose checkpoints have the experts of a layer in one tensor.
_BOTH, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def apart(tensors: make.Tensors) -> make.Tensors:
    """With a matrix for each expert."""
    found: make.Tensors = {}
    for name, values in tensors.items():
        layer = name.removesuffix(_BOTH).removesuffix(_DOWN)
        if layer == name:
            found[name] = values
            continue
        for expert, own in enumerate(values):
            parts = own.chunk(2) if name.endswith(_BOTH) else [own]
            names = ("gate_proj", "up_proj") if name.endswith(_BOTH) else ("down_proj",)
            found |= {
                f"{layer}.experts.{expert}.{part}.weight": each.contiguous()
                for part, each in zip(names, parts, strict=True)
            }
    return found


def together(tensors: make.Tensors, names: list[str]) -> make.Tensors:
    """The reverse, for a checkpoint with these names."""
    found = {name: values for name, values in tensors.items() if name in names}
    for name in (name for name in names if name not in tensors):
        layer = name.removesuffix(_BOTH).removesuffix(_DOWN)
        parts = ("gate_proj", "up_proj") if name.endswith(_BOTH) else ("down_proj",)
        count = sum(each.startswith(f"{layer}.experts.") for each in tensors) // 3
        found[name] = torch.stack(
            [
                torch.cat([tensors[f"{layer}.experts.{expert}.{part}.weight"] for part in parts])
                for expert in range(count)
            ]
        )
    return found


@pytest.mark.parametrize("name", PLACES)
def test_experts_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    """And projections that the library initialises as parts of other modules, such as the router of afmoe."""
    need_compiled()
    model_type, settings = gguf_library.settings_of(name)
    source = make_family_model(tmp_path / "source", model_type, settings | {"moe_intermediate_size": 64})
    directory, dense = (make.in_one_file(source, tmp_path / each) for each in ("mlx", "dense"))
    file = directory / "model.safetensors"
    original = load_file(file)
    save_file(apart(original), file)
    meant = make.mlx(directory)
    tensors = load_file(file)
    save_file({each.replace(".switch_mlp.", PLACES[name]): one for each, one in tensors.items()}, file)
    save_file(together(meant, [*original]), dense / "model.safetensors", {"format": "pt"})
    assert choose_backend(directory, AUTO).backend == TRANSFORMERS
    model, _ = load_served(
        directory,
        "float32",
        torch.device("cpu"),
        None,
        backend=TRANSFORMERS,
        self_check=True,
        rounds_rows=False,
    )
    assert isinstance(model, LibraryModel)
    kinds = {type(part) for part in model.module.modules()}
    assert {PackedLinear, QuantisedExperts} <= kinds
    expected = hf_model(dense)
    bound = float32_losses(expected, [TEXT], with_states=False)[0, 0]
    with torch.inference_mode():
        logits = expected(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert (model.plain_logits(torch.tensor(TEXT)) - logits).abs().max() < bound
