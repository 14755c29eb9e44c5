"""gpt_oss as its makers write it: experts in MXFP4, all of a layer in one tensor."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.utils.quantization_config import Mxfp4Config

from kernels.gated_activation import gated_activation, gated_activation_reference
from tests import quantised_directories as make
from tests.bad_directories import setting
from tests.families import settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from tests.workers.test_gguf_models import TEXT, rounded
from tests.workers.test_quantised_directories import matrices
from tests.workers.test_quantised_experts import assert_logits_are, is_one_call
from workers.executors.loading import (
    AUTO,
    NATIVE,
    TRANSFORMERS,
    choose_backend,
    lacks_on_gpu,
    load_served,
)
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.library.quantised_module import separate_experts
from workers.models.self_check import tolerance

CPU = torch.device("cpu")
FUZZED = 60
NAME = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def of_makers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one file."""
    directory = tmp_path_factory.mktemp("model")
    model_type, settings = settings_of("gpt_oss")
    make_family_model(directory / "plain", model_type, settings | {"num_hidden_layers": 2})
    make.mxfp4(make.in_one_file(directory / "plain", directory / "mxfp4"))
    return directory / "mxfp4"


@pytest.fixture(scope="module")
def dequantised(of_makers: Path) -> PreTrainedModel:
    """By the library."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        of_makers,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return model


def test_weights_are_those_that_the_library_reads(of_makers: Path, dequantised: PreTrainedModel) -> None:
    """And logits, but that projections of experts round what they multiply. It proves itself, too."""
    decoder, description = load_served(of_makers, "float32", CPU, None, backend=NATIVE, self_check=True)
    assert isinstance(decoder, Decoder) and description.quantization == "mxfp4"
    loaded = matrices(load_decoder(of_makers, "float32"))
    family = decoder.config.family
    with torch.inference_mode(), separate_experts(dequantised, family) as parameters:
        compared = {name for name in loaded if ".experts." in name}
        assert len(compared) == 2 * 6 * 3
        for name in compared:
            assert torch.equal(loaded[name], parameters[name]), name
        hooks = [
            part.register_forward_pre_hook(rounded)
            for name, part in dequantised.named_modules()
            if isinstance(part, torch.nn.Linear) and ".experts." in name
        ]
        expected = dequantised(torch.tensor([TEXT]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
    assert_logits_are(decoder, expected, tolerance(torch.bfloat16))


def test_weights_of_mlx_are_the_same(of_makers: Path, tmp_path: Path) -> None:
    directory = make.in_one_file(of_makers, tmp_path / "mlx")
    make.mlx_of_gpt_oss(directory)
    loaded, expected = (matrices(load_decoder(each, "float32")) for each in (directory, of_makers))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], values) for name, values in expected.items())
    assert choose_backend(directory, AUTO).backend == NATIVE


def test_bits_depend_on_nothing_else_in_the_batch(of_makers: Path) -> None:
    need_compiled()
    decoder = load_decoder(of_makers, torch.bfloat16, pack=True)
    assert is_one_call(decoder)
    assert_same_bits(decoder, random_texts(3, (20, 33, 1)), "mxfp4", threads=2)


def test_its_gate_is_that_of_the_library() -> None:
    rows = torch.randn(40, 2 * 33, generator=torch.Generator().manual_seed(1)) * 6
    rows[0, :4], rows[1, 33:37] = (
        torch.tensor([torch.inf, -torch.inf, torch.nan, 7.0]),
        torch.tensor([torch.inf, -torch.inf, torch.nan, -7.0]),
    )
    library = GptOssExperts.__new__(GptOssExperts)
    vars(library).update(alpha=1.702, limit=7.0)
    interleaved = torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1)
    expected = library._apply_gate(interleaved)
    assert torch.equal(
        gated_activation_reference(rows, "clamped_swiglu").nan_to_num(9.0), expected.nan_to_num(9.0)
    )
    torch.testing.assert_close(
        gated_activation(rows, "clamped_swiglu"), expected, rtol=40 * 2**-24, atol=1e-37, equal_nan=True
    )


def test_it_is_native_on_a_gpu_too(of_makers: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(of_makers / "model.safetensors")
    config = json.loads((of_makers / "config.json").read_text())
    assert choose_backend(of_makers, AUTO).backend == NATIVE
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64}))  # as the real ones have
    assert choose_backend(tmp_path, AUTO, on_cuda=True).backend == NATIVE
    assert not lacks_on_gpu(tmp_path, AUTO)


def without(name: str) -> dict[str, torch.Tensor | None]:
    return {name: None}


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": (without(f"{NAME}_scales"), "gate_up_proj_scales is missing"),
    "no blocks": (without(f"{NAME}_blocks"), "gate_proj.weight is missing"),
    "a scale that is not a number": (
        {f"{NAME}_scales": torch.full((6, 192, 2), 255, dtype=torch.uint8)},
        "gate_up_proj_scales is not finite, or too large",
    ),
    "fewer experts": (
        {
            f"{NAME}_blocks": torch.zeros(5, 192, 2, 16, dtype=torch.uint8),
            f"{NAME}_scales": torch.zeros(5, 192, 2, dtype=torch.uint8),
        },
        "gate_up_proj_blocks is of 5 experts, and the config says 6",
    ),
    "an odd number of outputs": (
        {
            f"{NAME}_blocks": torch.zeros(6, 193, 2, 16, dtype=torch.uint8),
            f"{NAME}_scales": torch.zeros(6, 193, 2, dtype=torch.uint8),
        },
        "which cannot be",
    ),
    "no inputs": ({f"{NAME}_blocks": torch.zeros(6, 192, 0, 16, dtype=torch.uint8)}, "must be [experts, out"),
    "wider experts": (
        {
            f"{NAME}_blocks": torch.zeros(6, 256, 2, 16, dtype=torch.uint8),
            f"{NAME}_scales": torch.zeros(6, 256, 2, dtype=torch.uint8),
        },
        "gate_up_proj_blocks has shape [128, 64], but the config asks for [96, 64]",
    ),
    "biases of fewer experts": ({f"{NAME}_bias": torch.zeros(5, 192)}, "gate_up_proj_bias is of 5 experts"),
    "not quantised": ({f"{NAME}_blocks": torch.zeros(6, 192, 2, 16)}, "gate_up_proj_blocks must be U8"),
    "a sink too many": ({"model.layers.0.self_attn.sinks": torch.zeros(5)}, "sinks has shape [5]"),
}


def changed(of_makers: Path, directory: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((of_makers / "config.json").read_bytes())
    all_of_them = {**load_file(of_makers / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in all_of_them.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_is_refused_by_name(kind: str, of_makers: Path, tmp_path: Path) -> None:
    tensors, message = WRONG[kind]
    with pytest.raises(ModelError, match=re.escape(message)):
        load_decoder(changed(of_makers, tmp_path, tensors))


def test_damaged_headers_are_refused_in_a_line_or_load(of_makers: Path, tmp_path: Path) -> None:
    """Nothing else comes of them."""
    good = (of_makers / "model.safetensors").read_bytes()
    config = (of_makers / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    size, said = int.from_bytes(good[:8], "little"), []
    for seed in range(FUZZED):
        dice, header = random.Random(seed), bytearray(good[8 : 8 + size])
        for _ in range(dice.choice((1, 1, 2, 3))):
            place = dice.choice([place for place, byte in enumerate(header) if byte in b"0123456789"])
            header[place] = dice.choice(b"0123456789")
        if seed % 3 == 0:
            other = dice.choice([b"bias", b"scales", b"blocks"])
            header = bytearray(
                header.replace(dice.choice([b"blocks", b"scales"]), other, dice.randrange(1, 4))
            )
        content = len(header).to_bytes(8, "little") + header + good[8 + size :]
        (tmp_path / "model.safetensors").write_bytes(
            content[: dice.choice((None, None, -dice.randrange(99)))]
        )
        try:
            load_decoder(tmp_path)
            said.append("")
        except ModelError as error:
            said.append(str(error))
    assert all(not each or (str(tmp_path) in each and "\n" not in each) for each in said)
    assert any(said)


@pytest.mark.parametrize(("name", "value"), [("swiglu_limit", 8.0), ("swiglu_alpha", 1.5)])
def test_another_gate_is_left_to_the_library(
    name: str, value: float, of_makers: Path, tmp_path: Path
) -> None:
    plain = of_makers.parent / "plain"
    directory = shutil.copytree(plain, tmp_path / "model")
    setting(**{name: value})(directory)
    choice = choose_backend(directory, AUTO)
    assert choice.backend == TRANSFORMERS and name in choice.reason
