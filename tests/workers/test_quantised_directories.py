"""Directories whose weights are quantised already, in each format: what is loaded is what the files say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from tests import quantised_directories as make
from tests.model_factory import TinyModel, load_decoder, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from workers.models.decoder import Decoder
from workers.models.native_parity_check import check_native
from workers.models.weights import plan_load

torch.set_num_threads(1)

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [32, 32]}
ROUNDED = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}

# Eight roundings of bfloat16, as a self-check allows.
ROUNDED_LOSS = 6.2e-2

Make = Callable[[Path], make.Tensors]
DIRECTORIES: dict[str, Make] = {
    "gptq": make.gptq,
    "gptq with zero points": lambda directory: make.gptq(directory, symmetric=False),
    "gptq of 8 bits": lambda directory: make.gptq(directory, bits=8, group=-1, version=2),
    "gptq of 8 bits with zero points": lambda directory: make.gptq(directory, bits=8, symmetric=False),
    "gptq in another order": lambda directory: make.gptq(directory, ordered=True),
    "gptq in another order with zero points and a head": lambda directory: make.gptq(
        directory, ordered=True, symmetric=False, version=2, also=["lm_head"]
    ),
    "awq": make.awq,
    "awq in part": lambda directory: make.awq(directory, left=["v_proj", "0.mlp.up_proj"]),
    "w4a16": lambda directory: make.compressed(directory, "pack-quantized", INT4),
    "w4a16 with zero points": lambda directory: make.compressed(
        directory, "pack-quantized", INT4 | {"symmetric": False}
    ),
    "w4a16 in another order": lambda directory: make.compressed(
        directory, "pack-quantized", INT4, ordered=True, scale_dtype=torch.float32
    ),
    "w8a16": lambda directory: make.compressed(directory, "pack-quantized", INT8),
    "w8a8": lambda directory: make.compressed(directory, "int-quantized", INT8, inputs=ROUNDED),
    "w8a8 with zero points and a head": lambda directory: make.compressed(
        directory, "int-quantized", INT8 | {"symmetric": False}, inputs=ROUNDED, also=["lm_head"], ignore=[]
    ),
    "w4a8": lambda directory: make.compressed(directory, "int-quantized", INT4, inputs=ROUNDED),
    "float8 of compressed-tensors": lambda directory: make.compressed(directory, "float-quantized", FLOAT8),
    "float8 with a scale for a matrix": lambda directory: make.compressed(
        directory, "naive-quantized", FLOAT8 | {"strategy": "tensor"}
    ),
    "float8 in blocks of compressed-tensors": lambda directory: make.compressed(
        directory, "float-quantized", BLOCKS
    ),
    "float8 in blocks": make.float8,
    "float8 in large blocks with an embedding": lambda directory: make.float8(
        directory, block=(128, 128), also=["lm_head", "model.embed_tokens"]
    ),
    "float8 with one scale": lambda directory: make.float8(directory, block=None),
}


def made(directory: Path, name: str, dtype: str = "float32") -> make.Tensors:
    """Writes a directory. Returns what its weights are."""
    make_model(directory, TinyModel(dtype=dtype))
    return DIRECTORIES[name](directory)


def matrices(decoder: Decoder) -> make.Tensors:
    """What a decoder has in memory, by the names in a checkpoint."""
    found = {}
    for name, target in decoder.targets().items():
        if target.taken is not None and len(target.shape) == 2:
            found[name] = target.into.dense()[target.first : target.first + target.taken.num_rows]
    return found


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_weights_are_those_of_the_files_exactly(name: str, tmp_path: Path) -> None:
    meant = made(tmp_path, name)
    loaded = matrices(load_decoder(tmp_path))
    assert loaded.keys() == {tensor for tensor, values in meant.items() if values.dim() == 2}
    for tensor, values in loaded.items():
        assert torch.equal(values, meant[tensor]), tensor


@pytest.mark.parametrize("name", DIRECTORIES)
def test_it_proves_itself(name: str, tmp_path: Path) -> None:
    made(tmp_path, name, "bfloat16")
    for dtype in ("float32", "bfloat16"):
        plan = plan_load(tmp_path, dtype)
        assert check_native(tmp_path, plan.config, plan.dtype, plan.device, forms=plan.forms) is not None


# The library reads them itself.
@pytest.mark.parametrize(
    "name", [name for name in DIRECTORIES if "float8" in name or "w4" in name or "w8" in name]
)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """Of integers within what rounding inputs to 8 bits changes: see ADR 60."""
    if "order" in name:
        pytest.skip("the library has forgotten how to read it")
    made(tmp_path, name)
    tokens = random_texts(1, (40,))[0]
    config = AutoConfig.from_pretrained(tmp_path)
    if config.quantization_config["quant_method"] == "fp8":
        said = FineGrainedFP8Config(
            dequantize=True, weight_block_size=config.quantization_config["weight_block_size"]
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=said)
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    rows = (logits(load_decoder(tmp_path, pack=True), tokens) - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.median() < (1e-4 if "float8" in name else ROUNDED_LOSS)


def logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    inputs = new_packer(1).pack([Item(HandSequence(), tokens, range(len(tokens)))])
    return decoder.logits(decoder.forward(inputs, poisoned_pages(decoder))).float()
