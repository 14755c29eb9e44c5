"""Which directories hold a quantised model that is not served. Servers: tests/e2e/test_refused_starts.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire.cli.main import main
from safetensors.torch import load_file, save_file

from service.config import Config
from service.model_check import quantised, quantised_problem
from tests.bad_directories import make_good, setting

Damage = Callable[[Path], object]


def with_tensor(name: str, tensor: torch.Tensor) -> Damage:
    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        save_file(load_file(file) | {name: tensor}, file)

    return change


def quantised_by(quant_method: str, **settings: object) -> Damage:
    return setting(quantization_config={"quant_method": quant_method, **settings})


PACKED = torch.zeros(8, 8, dtype=torch.int32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AUTO_ROUND = {**GPTQ, "quant_method": "auto-round", "sym": True, "packing_format": "auto_round:auto_gptq"}
QUANTISED: dict[str, tuple[Damage, str]] = {
    "another method": (
        quantised_by("quanto"),
        "fbgemm_fp8, fp8, gptq, mlx, modelopt, mxfp4, got 'quanto': use the original",
    ),
    "bitsandbytes": (
        quantised_by("bitsandbytes", bnb_4bit_quant_type="nf4"),
        "(bitsandbytes): load_in_4bit: either this or load_in_8bit must be true",
    ),
    "tensors of bitsandbytes": (with_tensor("q_proj.weight.absmax", torch.ones(4)), "by the tensors of"),
    "nvfp4": (
        quantised_by("modelopt", quant_algo="NVFP4"),
        "quantization_config (modelopt): quant_algo: must be FP8, got 'NVFP4'",
    ),
    "auto-round of 5 bits": (setting(quantization_config=AUTO_ROUND | {"bits": 5}), "bits: must be 2, 3, 4"),
    "auto-round without a format": (
        setting(quantization_config={**AUTO_ROUND, "packing_format": None}),
        "packing_format: must be auto_round:auto_gptq or auto_round:auto_awq, got None",
    ),
    "auto-round in other bits for a module": (
        setting(quantization_config=AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 8}}}),
        "extra_config: must only leave modules out",
    ),
    "auto-round with zero points": (setting(quantization_config=AUTO_ROUND | {"sym": False}), "sym: must be"),
    "mxfp4 of others": (
        quantised_by("mxfp4", group_size=16),
        "quantization_config (mxfp4): group_size: is not known, got 16",
    ),
    "without a method": (setting(quantization_config={"bits": 4}), "got None"),
    "5 bits": (
        setting(quantization_config=GPTQ | {"bits": 5}),
        "quantization_config (gptq): bits: must be 2, 3, 4 or 8, got 5",
    ),
    "5 bits in the file of the tool": (
        lambda directory: (directory / "quantize_config.json").write_text('{"bits": 5, "group_size": 128}'),
        "quantization_config (gptq): bits: must be 2, 3, 4 or 8, got 5",
    ),
    "an older spelling": (setting(compression_config={"format": "int-quantized"}), "says compression_config"),
    "mlx": (
        setting(quantization={"group_size": 64, "bits": 1}),
        "says quantization (mlx): bits: must be 2",
    ),
    "of the text part": (
        setting(text_config={"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 32}}),
        "quantization_config (awq): bits: must be 4, got 8",
    ),
    "of the text part of InternVL": (
        setting(llm_config={"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 32}}),
        "quantization_config (awq): bits: must be 4, got 8",
    ),
    "tensors of GPTQ and AWQ": (
        with_tensor("model.layers.0.mlp.up_proj.qweight", PACKED),
        "by the tensors of model.safetensors, and config.json does not say how",
    ),
    "8-bit floats": (
        with_tensor("model.layers.0.mlp.up_proj.x", torch.zeros(4, dtype=torch.float8_e4m3fn)),
        "by the tensors of model.safetensors",
    ),
}


def make(directory: Path, damage: Damage) -> Path:
    make_good(directory, sharded=False)
    damage(directory)
    return directory


@pytest.mark.parametrize(("damage", "says"), QUANTISED.values(), ids=list(QUANTISED))
def test_it_is_noticed(damage: Damage, says: str, tmp_path: Path) -> None:
    assert says in quantised(make(tmp_path / "model", damage))


@pytest.mark.parametrize(
    "damage",
    [
        setting(),
        setting(quantization_config=None),
        setting(quantization_config={}),
        setting(quantization_config=GPTQ),
        setting(quantization={"group_size": 64, "bits": 4}),
        setting(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        setting(text_config=7),
        lambda directory: (directory / "config.json").write_text("[]"),
        lambda directory: (directory / "config.json").write_text("{"),
        lambda directory: (directory / "model.safetensors").write_bytes(b"x"),
        # Of a tool whose result is elsewhere.
        lambda directory: (directory / "quantize_config.json").write_text("{}"),
        lambda directory: (directory / "model.gguf").touch(),
    ],
)
def test_others_are_left_to_workers(damage: Damage, tmp_path: Path) -> None:
    assert quantised(make(tmp_path / "model", damage)) == ""
    assert quantised(tmp_path / "nowhere") == ""


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", setting(quantization_config=GPTQ))
    config = Config(model=str(directory), quantization="q8_0")
    assert quantised_problem(config) == "its weights are quantised already: leave out quantization"
    assert quantised_problem(Config(model=str(directory), model_backend="transformers")) == ""


def test_a_check_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make(tmp_path / "model", QUANTISED["5 bits"][0])
    file = tmp_path / "quire.toml"
    file.write_text(f"listen = '127.0.0.1:0'\nmodel = {json.dumps(str(directory))}\n")
    assert main(["serve", "--check", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert "its weights are quantised, and config.json says quantization_config (gptq): bits" in said
    assert f"quire: model = {str(directory)!r} (from {file}) is refused: " in said
