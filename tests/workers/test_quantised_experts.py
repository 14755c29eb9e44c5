"""Mixtures of experts with quantised weights: from GGUF files and directories, and quantised at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kernels.cpu.experts import PackedWeights
from tests import quantised_directories as make
from tests.families import paired, settings_of
from tests.gguf_files import TypeOf, write_gguf
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import hf_model, load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from tests.workers.test_gguf_models import TEXT, WIDE, logits, rounded
from tests.workers.test_quantised_directories import INT4, INT8, ROUNDED, matrices
from tests.workers.test_quantised_models import add_adapters
from workers.executors.loading import NATIVE, load_served
from workers.models.builder import is_router
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.experts import Experts
from workers.models.library.quantised_module import separate_experts
from workers.models.native_parity_check import check_native
from workers.models.self_check import tolerance
from workers.models.source import source_of
from workers.models.weights import plan_load

CPU = torch.device("cpu")
LENGTHS = (20, 33, 1)
# As llama.cpp does: in half of the layers what goes back is more exact.
Q4_K_M: TypeOf = lambda name: (  # noqa: E731
    "q6_k" if "v_proj" in name or (("down_proj" in name or "w2" in name) and ".1." in name) else "q4_k"
)
KINDS: dict[str, TypeOf | str] = {
    "q8_0": "q8_0",
    "Q4_K_M": Q4_K_M,
    "mxfp4": lambda name: "mxfp4" if ".experts." in name else "q8_0",
    "gate and up apart": lambda name: "q5_k" if "up_proj" in name or "w3" in name else "q3_k",
}
FAMILIES = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "gpt_oss": {},
}


def family_model(directory: Path, name: str, **more: Any) -> Path:
    model_type, settings = settings_of(name)
    return make_family_model(directory, model_type, settings | {"num_hidden_layers": 2} | more)


def meant_by(file: Path, head_dim: int, *, interleaved: bool) -> make.Tensors:
    """What a file's tensors are, as the format's package dequantises them, by the names of a checkpoint."""
    tensors = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
    }
    found = {}
    for name, entry in source_of(file).tensors().items():
        values = tensors[entry.name]
        if ".experts." in name:
            values = values[int(name.partition(".experts.")[2].partition(".")[0])]
        if interleaved and (".q_proj" in name or ".k_proj" in name):
            values = values.view(-1, head_dim // 2, 2, values.shape[1]).transpose(1, 2).flatten(0, 2)
        found[name] = values
    return found


def library_logits(
    directory: Path, decoder: Decoder, meant: make.Tensors, *, rounds: bool = True
) -> torch.Tensor:
    """Those of the library's model with these weights, whose projections round what they multiply."""
    model = hf_model(directory)
    with torch.inference_mode(), separate_experts(model, decoder.config.family) as parameters:
        for name, values in meant.items():
            parameters[name].copy_(values)
        for part in model.modules():
            if rounds and isinstance(part, torch.nn.Linear):
                part.register_forward_pre_hook(rounded)
        found: torch.Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    return found


def assert_logits_are(decoder: Decoder, expected: torch.Tensor, most: float) -> None:
    found = logits(decoder, TEXT)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < most


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mixtral", "Q4_K_M"),
        ("qwen3_moe", "q8_0"),
        ("qwen3_moe", "gate and up apart"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_a_gguf_file_is_computed_as_it_is_dequantised(family: str, kind: str, tmp_path: Path) -> None:
    """By the library, with the same inputs rounded. It proves itself, too."""
    family_model(tmp_path / "hf", family, **WIDE | FAMILIES[family])
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", KINDS[kind])
    decoder, description = load_served(file, "float32", CPU, None, backend=NATIVE, self_check=True)
    assert isinstance(decoder, Decoder) and description.quantization
    meant = meant_by(file, decoder.config.head_dim, interleaved=family == "mixtral")
    plain = matrices(load_decoder(file, "float32"))
    for name, values in meant.items():
        if values.dim() == 2:
            assert torch.equal(plain[name], values), name
    assert_logits_are(decoder, library_logits(tmp_path / "hf", decoder, meant), tolerance(torch.bfloat16))


def is_one_call(decoder: Decoder) -> bool:
    bodies = [layer[-1].body for layer in decoder.layers]
    return all(isinstance(body, Experts) and isinstance(body.gate_up, PackedWeights) for body in bodies)


@pytest.mark.parametrize("kind", ["Q4_K_M", "gate and up apart"])
def test_bits_depend_on_nothing_else_in_the_batch(kind: str, tmp_path: Path) -> None:
    need_compiled()
    family_model(tmp_path / "hf", "qwen3_moe", **WIDE | FAMILIES["qwen3_moe"])
    decoder = load_decoder(write_gguf(tmp_path / "model.gguf", tmp_path / "hf", KINDS[kind]), pack=True)
    assert decoder.dtype == torch.float32 and is_one_call(decoder)
    assert_same_bits(decoder, random_texts(3, LENGTHS), kind, threads=2)


# A shared expert, and one with a gate; a router in float32 and groups; biases.
@pytest.mark.parametrize(
    ("name", "dtype"),
    paired(
        ("granitemoeshared", "qwen2_moe", "deepseek_v3", "gpt_oss"),
        [torch.bfloat16, torch.float32],
    ),
)
def test_bits_with_adapters_depend_on_nothing_else_in_the_batch(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    need_compiled()
    directory = make_family_model(tmp_path, *settings_of(name))
    decoder = load_decoder(directory, dtype, pack=True, quantization="q8_0")
    assert_same_bits(decoder, random_texts(3, LENGTHS), name, threads=2)
    add_adapters(decoder)
    assert_same_bits(decoder, random_texts(3, LENGTHS), name, threads=2, lora_slots=(1, -1, 0))


# Routers stay as they are, but for one of them.
ROUTER = ["mlp.gate"]
DIRECTORIES: dict[str, Callable[[Path], make.Tensors]] = {
    "gptq with zero points and a router": lambda directory: make.gptq(directory, symmetric=False),
    "gptq in another order": lambda directory: make.gptq(directory, ordered=True, left=ROUTER),
    "awq in part": lambda directory: make.awq(directory, left=[*ROUTER, "experts.2.up_proj", "1.down_proj"]),
    "w4a16": lambda directory: make.compressed(directory, "pack-quantized", INT4, left=ROUTER),
    "w8a8": lambda directory: make.compressed(directory, "int-quantized", INT8, inputs=ROUNDED, left=ROUTER),
    "float8 in blocks": lambda directory: make.float8(directory, left=ROUTER),
    "mlx with routers of 8 bits": lambda directory: make.mlx(
        directory, others={f"model.layers.{layer}.mlp.gate": 8 for layer in range(2)}
    ),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directories(name: str, tmp_path: Path) -> None:
    """Weights are those of the files, logits the library's with them, and bits depend on nothing else."""
    family_model(tmp_path / "plain", "qwen3_moe", moe_intermediate_size=64)
    directory = make.in_one_file(tmp_path / "plain", tmp_path / "quantised")
    meant = DIRECTORIES[name](directory)
    plan = plan_load(directory, "float32")
    assert check_native(directory, plan.config, plan.dtype, plan.device, forms=plan.forms) is not None
    loaded = matrices(load_decoder(directory, "float32"))
    assert loaded.keys() == {tensor for tensor, values in meant.items() if values.dim() == 2}
    for tensor, values in loaded.items():
        assert torch.equal(values, meant[tensor]), tensor
    decoder, is_float8 = load_decoder(directory, pack=True), "float8" in name
    if "another order" not in name:  # in which inputs are rounded: the check above knows it
        expected = library_logits(tmp_path / "plain", decoder, meant, rounds=not is_float8)
        assert_logits_are(decoder, expected, 1e-4 if is_float8 else tolerance(torch.bfloat16))
    need_compiled()
    assert is_one_call(decoder) == ("another order" not in name)
    assert_same_bits(decoder, random_texts(3, LENGTHS), name)


def test_mlx_has_other_names_for_the_experts_of_mixtral(tmp_path: Path) -> None:
    family_model(tmp_path / "plain", "mixtral")
    directory = make.in_one_file(tmp_path / "plain", tmp_path / "quantised")
    meant, loaded = make.mlx(directory), matrices(load_decoder(directory, "float32"))
    for name, values in loaded.items():
        assert torch.equal(values, meant[name]), name
    assert any("experts.1.w3" in name for name in loaded)
    file = directory / "model.safetensors"
    stack = "model.layers.1.block_sparse_moe.switch_mlp.up_proj.scales"
    make.change(directory, stack, lambda scales: scales[:-1])
    with pytest.raises(ModelError, match=rf"{file}: tensor {stack} has shape .* not of 1 to 4096 matrices"):
        load_decoder(directory)


@pytest.mark.parametrize(("family", "format_name"), paired(FAMILIES, ["q8_0", "q4_0", "q4_k_m"]))
def test_experts_are_quantised_at_load_and_routers_are_not(
    family: str, format_name: str, tmp_path: Path
) -> None:
    family_model(tmp_path, family)
    plain = matrices(load_decoder(tmp_path))
    decoder, description = load_served(
        tmp_path, "auto", CPU, None, backend=NATIVE, self_check=True, quantization=format_name
    )
    assert description.quantization == format_name
    for name, values in matrices(load_decoder(tmp_path, quantization=format_name)).items():
        lost = (values - plain[name]).norm() / plain[name].norm()
        assert (
            (lost == 0)
            if is_router(name)
            else (0 < lost < {"q8_0": 0.01, "q4_0": 0.12, "q4_k_m": 0.12}[format_name])
        ), name
    need_compiled()
    assert isinstance(decoder, Decoder) and is_one_call(decoder)


def test_another_number_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    family_model(tmp_path / "hf", "mixtral", **WIDE)
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", "q8_0", metadata={"llama.expert_count": 5})
    with pytest.raises(
        ModelError, match=r"tensor blk\.0\.ffn_down_exps\.weight is of 6 experts, and the metadata say 5"
    ):
        load_decoder(file)


def test_an_expert_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    family_model(tmp_path / "plain", "qwen3_moe")
    directory = make.in_one_file(tmp_path / "plain", tmp_path / "wrong")
    wrong = "model.layers.1.mlp.experts.3.down_proj.weight"
    make.change(directory, wrong, lambda tensor: tensor.index_fill_(1, torch.tensor([7]), float("nan")))
    with pytest.raises(ModelError, match=rf"tensor {wrong} is not finite"):
        load_decoder(directory, quantization="q8_0")
