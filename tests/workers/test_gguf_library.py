"""GGUF files of models that the transformers library runs: what they compute, and what stays quantised."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from service.config import Config
from service.model_check import refusal
from tests import gguf_library
from tests.gguf_files import TypeOf, write_gguf
from tests.gguf_library import MODELS
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_model, make_family_model
from workers.executors.loading import AUTO, NATIVE, TRANSFORMERS, choose_backend, load_served
from workers.models.errors import ModelError, UnsupportedError
from workers.models.library.library_model import LibraryModel
from workers.models.library.packed_linear import PackedEmbedding, PackedLinear
from workers.models.library.quantised_parts import QuantisedExperts
from workers.models.self_check import tolerance
from workers.models.source import source_of

CPU = torch.device("cpu")
TEXT = [(5 * i + 2) % 97 for i in range(37)]
# Rows of whole blocks of each format, and little else.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 300,
    "num_hidden_layers": 2,
}
# What is one part here is in two formats in the files that llama.cpp makes.
MIXED: TypeOf = lambda name: "q6_k" if "up_proj" in name or "v_proj" in name else "q4_k"  # noqa: E731


def tiny(directory: Path, name: str, **more: Any) -> Path:
    model_type, settings = gguf_library.settings_of(name)
    return make_family_model(directory, model_type, settings | more)


def load(file: Path, dtype: str = "float32", *, self_check: bool = False) -> LibraryModel:
    choice = choose_backend(file, AUTO)
    assert choice.backend == TRANSFORMERS
    model, _ = load_served(file, dtype, CPU, None, backend=choice.backend, self_check=self_check)
    assert isinstance(model, LibraryModel)
    return model


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = module(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median of the rows' relative errors, as of the self-check."""
    ours, theirs = (rows - rows.mean(1, keepdim=True) for rows in (found, expected))
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    directory = tiny(tmp_path / "hf", name)
    model = load(write_gguf(tmp_path / "model.gguf", directory, "f32"))
    expected = hf_model(directory)
    bound = float32_losses(expected, [TEXT], with_states=False)[0, 0]
    assert (model.plain_logits(torch.tensor(TEXT)) - logits(expected)).abs().max() < bound


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_projections_that_are_one_matrix_in_the_file(kind: str, tmp_path: Path) -> None:
    """As the converter makes it of the directories of GLM-4-9B."""
    source, fused = tiny(tmp_path / "hf", "glm"), tmp_path / "fused"
    fused.mkdir()
    shutil.copy(source / "config.json", fused)
    tensors = {name: each for file in source.glob("*.safetensors") for name, each in load_file(file).items()}
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    save_file(tensors, fused / "model.safetensors")
    one, three = (
        load(write_gguf(tmp_path / f"{directory.name}.gguf", directory, kind))
        for directory in (fused, source)
    )
    tokens = torch.tensor(TEXT)
    assert torch.equal(one.plain_logits(tokens), three.plain_logits(tokens))


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2", "cohere2", "gemma4 with experts"])
def test_what_is_quantised_stays_so(name: str, tmp_path: Path) -> None:
    """It takes the memory of the file, and computes with the values of the file; it passes the self-check."""
    need_compiled()
    more: dict[str, Any] = {"moe_intermediate_size": 256} if name != "cohere2" else {}
    if name.startswith("gemma4"):
        more |= {"global_head_dim": 128, "layer_types": ["sliding_attention", "full_attention"]}
    directory = tiny(tmp_path / "hf", name, **WIDE, **more, head_dim=64)
    file = write_gguf(tmp_path / "model.gguf", directory, MIXED)
    model, description = load_served(file, "float32", CPU, None, backend=TRANSFORMERS, self_check=True)
    assert isinstance(model, LibraryModel)
    assert description.quantization == "q4_k; q6_k"
    assert description.weight_bytes < 1.05 * file.stat().st_size
    kinds = {type(part) for part in model.module.modules()}
    assert PackedLinear in kinds and any(issubclass(kind, PackedEmbedding) for kind in kinds)
    assert (QuantisedExperts in kinds) == (name != "cohere2")
    module: Any = model.module
    expected: Any = hf_model(directory)
    parameters = dict(expected.named_parameters())
    with torch.no_grad():
        for tensor, entry in source_of(file).tensors().items():
            if entry.form is not None and tensor in parameters and tensor.endswith(".weight"):
                part = module.get_submodule(tensor.removesuffix(".weight"))
                if hasattr(part, "_packed"):
                    parameters[tensor].copy_(part._packed.dense())
        for place, part in module.named_modules():
            if isinstance(part, QuantisedExperts):
                stacked = expected.get_submodule(place)
                for index in range(len(part.down)):
                    stacked.gate_up_proj[index].copy_(part.gate_up[index].dense())
                    stacked.down_proj[index].copy_(part.down[index].dense())
    # Projections round what they multiply to 8 bits, unless they are told not to.
    assert error(model.plain_logits(torch.tensor(TEXT)), logits(expected)) < tolerance(torch.bfloat16)
    exact, other = load_served(
        file, "float32", CPU, None, backend=TRANSFORMERS, self_check=True, rounds_rows=False
    )
    assert isinstance(exact, LibraryModel) and not other.rounds_rows
    assert other.fingerprint != description.fingerprint and other.weight_bytes == description.weight_bytes
    assert error(exact.plain_logits(torch.tensor(TEXT)), logits(expected)) < tolerance(torch.float32)


def test_values_of_quantised_parts_are_those_of_the_file(tmp_path: Path) -> None:
    """Bit for bit, in whatever part, as the package of the format dequantises them."""
    import gguf

    directory = tiny(tmp_path / "hf", "glm4_moe", **WIDE, moe_intermediate_size=256)
    file = write_gguf(tmp_path / "model.gguf", directory, MIXED)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    module: Any = load(file).module

    def values(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(gguf.dequantize(stored[name].data, stored[name].tensor_type)))

    attention = module.model.layers[1].self_attn
    assert torch.equal(attention.v_proj._packed.dense(), values("blk.1.attn_v.weight"))
    assert torch.equal(module.model.embed_tokens(torch.arange(300)), values("token_embd.weight"))
    experts = module.model.layers[1].mlp.experts
    both = torch.cat([values("blk.1.ffn_gate_exps.weight"), values("blk.1.ffn_up_exps.weight")], dim=1)
    assert all(torch.equal(experts.gate_up[index].dense(), both[index]) for index in range(6))


def test_a_tied_head_has_the_weight_of_the_embedding(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "hf", "cohere2", **WIDE), "q8_0")
    module: Any = load(file).module
    assert module.lm_head._packed is module.model.embed_tokens._packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_has_no_part_of_its_own_is_dequantised(dtype: str, tmp_path: Path) -> None:
    """As experts of which one projection is not quantised."""
    directory = tiny(tmp_path / "hf", "olmoe", **WIDE)
    kinds: TypeOf = lambda name: "f16" if "experts" in name and "down_proj" in name else "q8_0"  # noqa: E731
    module: Any = load(write_gguf(tmp_path / "model.gguf", directory, kinds), dtype, self_check=True).module
    assert not any(isinstance(part, QuantisedExperts) for part in module.modules())
    assert module.model.layers[0].mlp.experts.gate_up_proj.dtype == getattr(torch, dtype)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("glm4", {"glm4.attention.scale": 0.1}, "glm4.attention.scale: is not supported, got 0.1"),
    "norm": ("phi", {"phi2.attention.layer_norm_epsilon": None}, "attention.layer_norm_epsilon: is missing"),
    "a part of heads": ("cohere2", {"cohere2.rope.dimension_count": 8}, "must be 16, got 8"),
    "another gate": (
        "glm4_moe",
        {"glm4moe.expert_gating_func": 1},
        "expert_gating_func: is not supported, got 1",
    ),
    "shared experts": ("hunyuan_v1_moe", {"hunyuan-moe.expert_shared_count": 2}, "is not supported, got 2"),
    "experts of a token": ("olmoe", {"olmoe.expert_used_count": None}, "expert_used_count: is missing"),
    "experts": ("olmoe", {"olmoe.expert_count": 8}, "is of 6 experts, and the metadata say 8"),
    "shape": ("starcoder2", {"starcoder2.feed_forward_length": 100}, "has shape .*, but the config asks for"),
    "too many layers": (
        "cohere2",
        {"cohere2.block_count": (1 << 31) - 1},
        "block_count: must be from 1 to 4096, got 2147483647",
    ),
    "layers": ("glm4", {"glm4.block_count": 5}, r"tensor model.layers.4.\S+ is missing|tensor .* is missing"),
}


@pytest.mark.parametrize(("name", "metadata", "said"), REFUSED.values(), ids=[*REFUSED])
def test_what_is_not_understood_is_refused_by_name(
    name: str, metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "hf", name), "f16", metadata=metadata)
    with pytest.raises(ModelError, match=said) as refusal:
        load(file)
    assert str(file) in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_library_may_be_asked_for(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "hf", "glm4"), "q8_0")
    assert refusal(Config(model=str(file), model_backend=TRANSFORMERS)) == ""
    assert choose_backend(file, TRANSFORMERS).backend == TRANSFORMERS


def test_native_code_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "hf", "glm4"), "q8_0")
    with pytest.raises(UnsupportedError, match="model_type: there is no native code for 'glm4'"):
        choose_backend(file, NATIVE)


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    directory = tiny(tmp_path / "hf", "starcoder2", **WIDE)
    file = write_gguf(tmp_path / "model.gguf", directory, "q8_0")
    begin = source_of(file).tensors()["model.layers.1.mlp.c_proj.weight"].begin
    content = bytearray(file.read_bytes())
    content[begin : begin + 2] = b"\x00\x7c"  # infinity
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_down\.weight is not finite"):
        load(file)
