"""Models in GGUF files: their weights, logits and tokenizers are those that transformers reads from them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from kernels.group_formats import FORMATS
from tests.families import settings_of
from tests.gguf_files import DENSE, TypeOf, Vocabulary, byte_level, sentencepiece, write_gguf
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import (
    TinyModel,
    float32_losses,
    hf_model,
    load_decoder,
    make_family_model,
    make_model,
)
from tests.workers.company import assert_same_bits
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from tests.workers.test_quantised_models import LENGTHS, add_adapters
from tests.workers.test_weights import loaded_bytes
from workers.common.gguf import GgufError
from workers.common.gguf.header import TYPES
from workers.common.gguf.settings import QUANTISED
from workers.common.gguf.splits import SPLITS, Split
from workers.executors.loading import AUTO, NATIVE, TRANSFORMERS, choose_backend, load_served
from workers.models import checkpoint
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.errors import ModelError, UnsupportedError
from workers.models.gguf.tokenizer import read_text
from workers.models.self_check import tolerance
from workers.models.source import source_of
from workers.models.weights import plan_load

CPU = torch.device("cpu")
TEXT = [(5 * i + 2) % 97 for i in range(37)]
# A row of theirs has whole blocks of each format.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300}
# As llama.cpp does, more exact where it counts: in one fused matrix are two formats.
Q4_K_M: TypeOf = lambda name: "q6_k" if "v_proj" in name or "down_proj" in name else "q4_k"  # noqa: E731
# Files have one of its factors for both.
LATENT_YARN = settings_of("deepseek_v3")[1]["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.7}
# What files of GGUF do not say, and what is not there yet.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {},
    "llama with biases": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma": {},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "phi3": {},
    "phi3 with longrope": {},
    "gpt_oss": {},
    "lfm2": {},
    "lfm2 with a narrower mlp": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "falcon_h1": {},
    "falcon_h1 with norms": {},
    "jamba": {},
    "jamba without experts": {},
    "nemotron_h": {"time_step_min": 0.001},
    "nemotron_h with experts": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mlp_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "mamba": {"max_position_embeddings": 2**20},
    "falcon_mamba": {"max_position_embeddings": 2**20},
    "mamba2": {"max_position_embeddings": 2**20},
    "granite hybrid": {},
    "granite hybrid with experts": {"position_embedding_type": "nope"},
    "qwen3_5": {"attention_bias": False},
    "qwen3_5 with experts": {},
    "qwen3_next": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None},
    "deepseek_v2": {"norm_topk_prob": False, "rope_parameters": LATENT_YARN},
    "deepseek_v3": {"attention_bias": False, "rope_parameters": LATENT_YARN},
    "glm4_moe_lite": {"rope_interleave": True, "mlp_layer_types": ["dense", *3 * ["sparse"]]},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "no_rope_layers": [1, 1, 1, 0]},
    "arcee": {"mlp_bias": False},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
}
# Models of which a file says the same in another way, or that another family computes.
NAMELESS = (
    "mamba",
    "llama3",
    "longrope",
    "glm4",
    "granitemoe",
    "falcon_h1",
    "jamba",
    "nemotron_h",
    "lfm2_moe",
)
# Architectures whose models compute as those of another family.
ALIKE = {
    "exaone": "llama3", "internlm2": "llama with biases", "baichuan": "llama", "ernie4_5": "llama",
    "minicpm": "granite",
    "seed_oss": "qwen2", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe",
}  # fmt: skip


def logits(decoder: Decoder, text: list[int], lora_slot: int = -1) -> torch.Tensor:
    items = [Item(HandSequence(lora_slot=lora_slot), text, range(len(text)))]
    return cast("torch.Tensor", new_packer(1).run(decoder, items, poisoned_pages(decoder))).float()


@pytest.mark.parametrize(
    ("name", "architecture"), [*dict.fromkeys(FAMILIES, "").items(), *((ALIKE[name], name) for name in ALIKE)]
)
def test_a_family_computes_what_transformers_does(name: str, architecture: str, tmp_path: Path) -> None:
    model_type, settings = settings_of(name)
    head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    more = {"attention_multiplier": head_dim**-0.5} if architecture == "minicpm" else {}
    directory = make_family_model(tmp_path / "hf", model_type, settings | FAMILIES[name] | more)
    written = {"gemma3.attention.sliding_window_pattern": 3} if name == "gemma3" else {}
    file = write_gguf(tmp_path / "model.gguf", directory, "f32", metadata=written, architecture=architecture)
    found = logits(load_decoder(file, "float32", pack=True), TEXT)
    model = hf_model(directory)
    bound = float32_losses(model, [TEXT], with_states=False)[0, 0]
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    assert (found - expected).abs().max() < bound
    if not any(each in name for each in NAMELESS):
        ours, theirs = ModelConfig.from_directory(file), ModelConfig.from_directory(directory)
        assert said(ours, theirs) == theirs


def test_what_a_file_does_not_say_is_known_by_its_layers(tmp_path: Path) -> None:
    directory = make_family_model(tmp_path / "hf", *settings_of("llama"))
    file = write_gguf(
        tmp_path / "model.gguf", directory, metadata={"baichuan.block_count": 40}, architecture="baichuan"
    )
    with pytest.raises(ModelError, match=r"block_count: of models with 40 layers ALiBi is not supported"):
        load_decoder(file)


@pytest.mark.parametrize(("kind", "pooling"), [(0, ""), (1, "mean"), (3, "lasttoken"), ([3, 3], "")])
def test_the_pooling_of_an_embedding_model_is_told(kind: Any, pooling: str, tmp_path: Path) -> None:
    """As in the files of Qwen3-Embedding."""
    vocabulary = byte_level("qwen2").metadata
    directory = make_model(tmp_path / "hf", TinyModel(vocab_size=len(vocabulary["tokens"])))
    written = {"qwen3.pooling_type": kind}
    file = write_gguf(tmp_path / "model.gguf", directory, tokenizer=vocabulary, metadata=written)
    _, description = load_served(file, "auto", CPU, None, backend=NATIVE, self_check=False)
    assert source_of(file).text(description.vocab_size, 1 << 20).pooling == pooling


def llama_file(directory: Path, kind: TypeOf | str) -> Path:
    make_family_model(directory / "hf", "llama", settings_of("llama")[1] | WIDE)
    return write_gguf(directory / "model.gguf", directory / "hf", kind)


def said(ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    """The first, but for what files do not say, and for the rounding of numbers to float32."""
    numbers = {name: getattr(theirs, name) for name in ("rms_norm_eps", "attention_scale", "residual_scale")}
    for name, number in numbers.items():
        assert getattr(ours, name) == pytest.approx(number, rel=1e-7)
    if ours.model_type == "granitemoehybrid":
        assert ours.max_position_embeddings == 2**20  # of a model without positions
        numbers["max_position_embeddings"] = theirs.max_position_embeddings
    return dataclasses.replace(ours, **numbers, eos_token_ids=(2,), bos_token_id=1, gguf_layout=False)


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    """Bit for bit those that the package of the format dequantises: a matrix of each, and another."""
    kinds = itertools.cycle([*DENSE, *FORMATS])
    file = llama_file(tmp_path, lambda name: "f32" if "norm" in name else next(kinds))
    decoder = load_decoder(file, "float32")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found_kinds = {tensor.tensor_type.name.lower() for tensor in tensors.values()}
    assert found_kinds == {*DENSE, *FORMATS}
    stored = source_of(file).tensors()
    for name, target in decoder.targets().items():
        tensor = tensors[stored[name].name]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".q_proj" in name or ".k_proj" in name:
            pairs = expected.view(-1, decoder.config.head_dim // 2, 2, expected.shape[1])
            expected = pairs.transpose(1, 2).reshape(expected.shape)
        found = target.into.dense()[target.first : target.first + len(expected)]
        assert torch.equal(found, expected), name


# In each family what a file has of several formats. Of one alone: test_values_are_those_of_the_file, and
# products in tests/kernels/test_grouped_weight.py.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family,
            kind,
            marks=[] if (family, kind) == ("llama", "mxfp4") or kind == "mixed" else [pytest.mark.thorough],
        )
        for family in ("llama", "qwen3", "gemma2", "qwen3_5", "lfm2")
        for kind in (*FORMATS, "mixed")
        # Of the last two the library does not read these.
        if family not in ("qwen3_5", "lfm2") or kind not in ("q5_0", "q5_1", "mxfp4")
    ],
)
def test_logits_are_those_that_transformers_computes_from_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    """With the weights dequantised, and what they multiply rounded. The limit is that of the self-check."""
    # The library reads neither the width of heads of qwen3, the bounds of gemma2 nor the list of layers of
    # qwen3_5: it has those of its own.
    of_library: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen3": {"head_dim": 128},
        "gemma2": {
            "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        "qwen3_5": {
            "attention_bias": False, "linear_value_head_dim": 128, "head_dim": 64,
            "layer_types": [*3 * ["linear_attention"], "full_attention"],
        },
        "lfm2": {"conv_bias": False},
    }  # fmt: skip
    model_type, settings = settings_of(family)
    make_family_model(tmp_path / "hf", model_type, settings | WIDE | of_library[family])
    type_of = Q4_K_M if kind == "mixed" else kind
    # It counts tokens, too.
    tokens = {"tokens": [str(token) for token in range(WIDE["vocab_size"])]}
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", type_of, tokenizer=tokens)
    decoder, description = load_served(file, "float32", CPU, None, backend=NATIVE, self_check=True)
    assert description.quantization == ("q4_k; q6_k" if kind == "mixed" else kind)
    assert isinstance(decoder, Decoder)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    centred = expected - expected.mean(1, keepdim=True)
    found = logits(decoder, TEXT)
    errors = (found - found.mean(1, keepdim=True) - centred).norm(dim=1) / centred.norm(dim=1)
    assert errors.median() < tolerance(torch.bfloat16)


def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What a projection multiplies, in groups of 32 signed bytes with a scale."""
    groups = inputs[0].reshape(*inputs[0].shape[:-1], -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (((groups / scale).round() * scale).flatten(-2),)


def test_bits_depend_on_nothing_else_in_the_batch(tmp_path: Path) -> None:
    """With several formats in a fused matrix; with adapters and without."""
    need_compiled()
    decoder = load_decoder(llama_file(tmp_path, Q4_K_M), pack=True)
    assert decoder.dtype == torch.float32
    assert_same_bits(decoder, random_texts(4, LENGTHS), "plain")
    add_adapters(decoder)
    assert_same_bits(decoder, random_texts(4, LENGTHS), "adapters", lora_slots=(1, -1, 0, 1, -1))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM from /proc")
def test_peak_memory_of_a_load_is_that_of_the_file(tmp_path: Path) -> None:
    """As of other loads: 8 MiB for allocators, and a part, of whose values several copies are made."""
    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    make_family_model(tmp_path / "hf", "llama", settings_of("llama")[1] | sizes)
    make_model(tmp_path / "small", TinyModel())
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", Q4_K_M)
    small = write_gguf(tmp_path / "small.gguf", tmp_path / "small", "q8_0")
    before, after, weights = loaded_bytes(file, small, checkpoint.PART_BYTES)
    assert weights < 1.05 * file.stat().st_size
    assert after - before <= weights + checkpoint.PART_BYTES + (8 << 20)


def test_formats_of_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    make_model(tmp_path / "hf", TinyModel())
    found: dict[str, str] = {}
    for kind in ("f32", "q8_0", "q4_0"):
        file = write_gguf(tmp_path / f"{kind}.gguf", tmp_path / "hf", kind)
        for _ in range(2):
            found.setdefault(
                load_served(file, "float32", CPU, None, backend=NATIVE, self_check=False)[1].fingerprint, kind
            )
    assert [*found.values()] == ["f32", "q8_0", "q4_0"]


@pytest.mark.parametrize("as_directory", [True, False])
def test_a_model_in_several_files(as_directory: bool, tmp_path: Path) -> None:
    make_model(tmp_path / "hf", TinyModel())
    whole = load_decoder(write_gguf(tmp_path / "whole.gguf", tmp_path / "hf", "q8_0"), "float32")
    (tmp_path / "split").mkdir()
    first = write_gguf(tmp_path / "split" / "m.gguf", tmp_path / "hf", "q8_0", max_shard_tensors=7)
    assert first.name == "m-00001-of-00004.gguf"
    (tmp_path / "split" / "mmproj-F16.gguf").write_bytes(b"of images")
    found = load_decoder(first.parent if as_directory else first, "float32")
    assert torch.equal(logits(found, TEXT), logits(whole, TEXT))
    second = first.with_name("m-00002-of-00004.gguf")
    with pytest.raises(
        ModelError, match=r"not the first file of a model: name that which ends with -00001-of"
    ):
        load_decoder(second)
    third = first.with_name("m-00003-of-00004.gguf").read_bytes()
    second.write_bytes(third)
    with pytest.raises(ModelError, match=r"m-00002-of-00004.gguf: must be file 1 of 4, says split.no = 2"):
        load_decoder(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00004.gguf: cannot be read: No such file"):
        load_decoder(first)


def test_one_file_of_several_is_told_how_to_be_named(tmp_path: Path) -> None:
    make_model(tmp_path / "hf", TinyModel())
    first = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", max_shard_tensors=7)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model.gguf: is one of 4 files of a model, whose names"):
        load_decoder(renamed)


def test_a_directory_with_several_models_is_to_be_named_with_one(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    make_model(tmp_path / "hf", TinyModel())
    for kind in ("f16", "q8_0"):
        write_gguf(tmp_path / "models" / f"{kind}.gguf", tmp_path / "hf", kind)
    with pytest.raises(ModelError, match=r"models: must have one GGUF model, .* has f16.gguf, q8_0.gguf"):
        load_decoder(tmp_path / "models")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "rwkv7"},
        "general.architecture: 'rwkv7' is not served: docs/models.md has what is",
    ),
    "unknown key": ({"qwen3.attention.scale": 0.1}, "qwen3.attention.scale: is not supported, got 0.1"),
    "missing": ({"qwen3.block_count": None}, "qwen3.block_count: is missing"),
    "no number": ({"qwen3.block_count": "two"}, "qwen3.block_count: must be from 1 to 4096, got 'two'"),
    "other layers": (
        {"qwen3.attention.head_count_kv": [2, 1]},
        r"qwen3.attention.head_count_kv: must be the same in all layers, got \[2, 1\]",
    ),
    "shape": (
        {"qwen3.feed_forward_length": 100},
        r"tensor blk.0.ffn_\w+.weight has shape .*, but the config asks",
    ),
    "value heads": (
        {"qwen3.attention.value_length": 16},
        "value_length: must be the key_length, got 16 and 32",
    ),
    "rope": ({"qwen3.rope.scaling.type": "su"}, "qwen3.rope.scaling.type: is not supported, got 'su'"),
    "factor of attention": (
        {"qwen3.rope.scaling.attn_factor": 1.5},
        "qwen3.rope.scaling.attn_factor: is not supported without long factors, got 1.5",
    ),
    "part of a head": (
        {"qwen3.rope.dimension_count": 16},
        "partial_rotary_factor: is not supported, got 0.5",
    ),
}


def load(file: Path) -> None:
    choice = choose_backend(file, AUTO)
    load_served(file, "auto", CPU, None, backend=choice.backend, self_check=False)


@pytest.mark.parametrize(("metadata", "said"), REFUSED.values(), ids=[*REFUSED])
def test_what_is_not_understood_is_refused_by_name(
    metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "hf", TinyModel())
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", "f16", metadata=metadata)
    with pytest.raises(ModelError, match=said) as refusal:
        load(file)
    assert str(refusal.value).startswith(str(file)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["linear", "yarn", "su"])
def test_a_scaling_beside_factors_of_frequencies_is_refused(kind: str, tmp_path: Path) -> None:
    make_family_model(tmp_path / "hf", *settings_of("llama3"))
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", "f16", metadata=scaling)
    with pytest.raises(
        ModelError, match=f"scaling.type: is not supported with rope_freqs.weight, got '{kind}'"
    ):
        plan_load(file)


def test_the_window_of_gemma2_has_a_default(tmp_path: Path) -> None:
    model_type, settings = settings_of("gemma2")
    make_family_model(tmp_path / "hf", model_type, settings | FAMILIES["gemma2"])
    key = {"gemma2.attention.sliding_window": None}
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", "f16", metadata=key)
    assert [layer.window for layer in ModelConfig.from_directory(file).layers][:2] == [4096, None]


def test_types_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    file = llama_file(tmp_path, "tq1_0")
    with pytest.raises(ModelError, match=r"tensor \S+ must be one of bf16, .*, got tq1_0"):
        plan_load(file)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q6_k"])
def test_scales_that_are_not_finite_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    file = llama_file(tmp_path, kind)
    tensor = source_of(file).tensors()["model.layers.1.mlp.down_proj.weight"]
    place = {"q8_0": 0, "q4_k": 2, "q6_k": 208}[kind]
    content = bytearray(file.read_bytes())
    for wrong in (b"\x00\x7c", b"\x01\xfe"):  # infinity, and not a number
        content[tensor.begin + place : tensor.begin + place + 2] = wrong
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_down\.weight is not finite"):
            load_decoder(file)


def test_what_quantised_files_cannot_have_yet_is_refused(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "dense", TinyModel())
    quantised = write_gguf(tmp_path / "quantised.gguf", dense, "q8_0")
    with pytest.raises(UnsupportedError, match=r"tensor \S+ is quantised already \(q8_0\): leave out"):
        plan_load(quantised, quantization="q4_0")
    with pytest.raises(ModelError, match="model_backend = transformers runs no model in MXFP4"):
        choose_backend(quantised, TRANSFORMERS)
    plan = plan_load(write_gguf(tmp_path / "dense.gguf", dense, "f16"), quantization="q4_0")
    assert plan.format_names == "q4_0", "others can be quantised"


def test_what_a_gateway_knows_of_formats_is_what_workers_hold() -> None:
    assert FORMATS.keys() == QUANTISED
    sizes = {
        kind.name.lower(): (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    assert {name: (number, *size) for number, (name, *size) in TYPES.items()} == sizes


# Of which the library does not know how they split texts.
NOT_IN_THE_LIBRARY = {
    "afmoe": ["a", " ", " b", "'LL", "1", "234", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "minimax-m2": ["a", " ", " b'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "chatglm-bpe": ["a", " ", " b", "'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "glm4": ["a", " ", " b", "'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "seed-coder": ["a", " ", " b", "'LL", *"1234", "\u4f60", "!?", "\n\n", "\u3042", " ", " x"],
    "deepseek-llm": ["a", " ", " b", "'", "LL", "1234", "\u4f60", "!?", "\n", "\n", "\u3042", " ", " x"],
    "deepseek-v3": ["a", " ", " b", "'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "kimi-k2": ["a", " ", " b'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "hunyuan-dense": ["a", " ", " b", "'LL", "123", "4", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "hunyuan": ["a", " ", " b", "'LL", *"1234", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
    "stablelm2": ["a", " ", " b", "'LL", *"1234", "\u4f60", "!?\n\n", "\u3042", " ", " x"],
}


def tokenizer_of(file: Path, vocabulary: Vocabulary, architecture: str = "llama") -> Tokenizer:
    """What is read from a file with this vocabulary, which is written first."""
    vocabulary.write_to(gguf.GGUFWriter(file, architecture))
    return Tokenizer.from_str(source_of(file).text(1000, 1 << 20).tokenizer_json.decode())


@pytest.mark.parametrize("kind", NOT_IN_THE_LIBRARY)
def test_a_text_is_split_as_llama_cpp_does_it(kind: str, tmp_path: Path) -> None:
    splitter = tokenizer_of(tmp_path / "model.gguf", byte_level(kind)).pre_tokenizer
    given = "a  b'LL1234\u4f60!?\n\n\u3042  x"
    found = [given[first:end] for _, (first, end) in splitter.pre_tokenize_str(given)]
    assert found == NOT_IN_THE_LIBRARY[kind]


@pytest.mark.parametrize(
    "kind", [*sorted(SPLITS.keys() - NOT_IN_THE_LIBRARY), "llama", "phi3", "gemma2", "gemma4"]
)
def test_a_tokenizer_encodes_as_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """Which reads the same file. Left out is where it differs from the models' own tokenizers."""
    has_space, lists_merges = not kind.startswith("gemma"), kind == "gemma4"
    made = (
        byte_level(kind)
        if kind in SPLITS
        else sentencepiece(add_space_prefix=has_space, lists_merges=lists_merges)
    )
    file = tmp_path / "model.gguf"
    ours = tokenizer_of(file, made, kind if kind not in SPLITS else "llama")
    architecture, described, _ = get_gguf_tokenizer(str(file))
    theirs, _ = convert_gguf_tokenizer(architecture, described)
    for text in texts():
        if SPLITS.get(kind, Split()).digits and any(map(str.isdigit, text)):
            continue  # each digit is alone
        if kind == "llama" and (text.startswith(" ") or "<|" in text):
            continue  # a space comes before each text
        if kind == "phi3" and re.search(r"<\|\w+\|>\s", text):
            continue  # the model's own drops whitespace there
        found = ours.encode(text, add_special_tokens=False)
        assert found.ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(found.ids) == theirs.decode(found.ids)


def texts() -> list[str]:
    dice = random.Random(0)
    parts = [*"a \n\té1-你🙂", "the ", "23", "'s", "<|eot|>", "<|user|>", "Zx", "I'M"]
    drawn = ["".join(dice.choices(parts, k=dice.randrange(20))) for _ in range(300)]
    return ["", "Hello world!", "foo_bar(baz)[1]/2\\n//\r\n", "x\x00y", *drawn]


def test_a_vocabulary_of_too_many_merges_is_refused() -> None:
    alphabet = "".join(map(chr, range(256, 446)))
    pieces = [alphabet[first:end] for first in range(190) for end in range(first + 1, 191)]
    tokenizer: dict[str, Any] = {"model": "llama", "tokens": pieces, "scores": [0.0] * len(pieces)}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    with pytest.raises(GgufError, match="tokens: pieces can be made of others in more than 1048576 ways"):
        read_text(metadata, len(pieces), 1 << 20)


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    for number, (flags, expected) in enumerate(
        (
            ({}, ["<|bos|>", "A"]),  # of this pre-tokenizer
            ({"add_bos_token": False}, ["A"]),
            ({"add_bos_token": True, "add_eos_token": True}, ["<|bos|>", "A", "<|eot|>"]),
        )
    ):
        file = tmp_path / f"{number}.gguf"
        byte_level("llama-bpe", **flags).write_to(gguf.GGUFWriter(file, "llama"))
        text = source_of(file).text(1000, 1 << 20)
        assert Tokenizer.from_str(text.tokenizer_json.decode()).encode("A").tokens == expected
        assert text.chat_template.special_tokens["eos_token"] == "<|eot|>"
        assert text.end_id is not None


def test_the_unknown_token_is_a_special_one(tmp_path: Path) -> None:
    """As in llama.cpp and in transformers: a text finds it by its name, and it has no text itself."""
    tokenizer = tokenizer_of(tmp_path / "model.gguf", sentencepiece())
    assert tokenizer.encode("<unk>", add_special_tokens=False).ids == [0]
    assert tokenizer.decode([0]) == ""


def test_whitespace_after_the_markers_of_phi3_is_dropped(tmp_path: Path) -> None:
    """As by the model's own tokenizer: its chat template writes a line feed behind each."""
    for architecture, expected in (
        ("phi3", ["<|user|>", "▁a", "<|user|>", "▁b"]),
        ("llama", ["<|user|>", "▁", "\n", "a", "<|user|>", "▁", "▁b"]),
    ):
        tokenizer = tokenizer_of(tmp_path / f"{architecture}.gguf", sentencepiece(), architecture)
        found = tokenizer.encode("<|user|>\na<|user|> b", add_special_tokens=False).ids
        assert [*map(tokenizer.id_to_token, found)] == expected


def test_texts_are_normalized_where_the_model_does_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "model.gguf", byte_level("qwen2"), "qwen2")
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids
