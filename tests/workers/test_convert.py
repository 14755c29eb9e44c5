"""Models that are written as GGUF files: read back bit for bit, also by the package gguf; what is refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from kernels.grouped_weight import GroupedWeight
from tests.families import settings_of
from tests.gguf_files import PRE_TOKENIZER, Vocabulary, byte_level, sentencepiece, write_gguf
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model, pooled_by
from tests.workers.test_gguf_models import LATENT_YARN, logits
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.gguf.convert import convert
from workers.models.gguf.tokenizer import read_text
from workers.models.linear import Linear
from workers.models.recipes import RECIPES
from workers.models.source import source_of

# With rows of whole super-blocks and without.
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
_DELTA_RULE = {
    "layer_types": None, "full_attention_interval": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_LATENT = _EXPERTS | {"q_lora_rank": 32, "v_head_dim": 32, "rope_parameters": LATENT_YARN}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "num_hidden_layers": 8},
    "llama3": {},
    "llama with biases": _WIDE,
    "mistral": {},
    "mistral without a window": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma": _WIDE,
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "phi3": {},
    "phi3 with longrope": {},
    "olmo2": {},
    "arcee": {"mlp_bias": False},
    "granite": {},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "no_rope_layers": [1, 1, 1, 0]},
    "lfm2": {},
    "lfm2 with a narrower mlp": {},
    "olmo3": {},
    "mixtral": {},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None, **_EXPERTS},
    "qwen3_moe": _WIDE | {"moe_intermediate_size": 256},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 96},
    "granite hybrid": _WIDE,
    "granite hybrid with experts": {"intermediate_size": 64, "shared_intermediate_size": 96},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True, **_EXPERTS},
    "jamba": {"mamba_dt_rank": 32},
    "mamba": {"time_step_rank": 32},
    "falcon_mamba": {"time_step_rank": 32},
    "mamba2": {},
    "nemotron_h": {"mamba_head_dim": 32, "time_step_min": 0.001},
    "nemotron_h with experts": {
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_head_dim": 32,
        "mlp_bias": False,
        "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 64,
    },
    "qwen3_5": _DELTA_RULE | {"attention_bias": False},
    "qwen3_5 with experts": _DELTA_RULE | _EXPERTS,
    "qwen3_next": _DELTA_RULE | _EXPERTS | {"mlp_only_layers": [], "norm_topk_prob": True},
    "deepseek_v2": _LATENT | {"norm_topk_prob": False},
    "deepseek_v3": _LATENT | {"attention_bias": False, "mlp_layer_types": None},
    "glm4_moe_lite": _LATENT | {"rope_interleave": True, "mlp_layer_types": ["dense", *3 * ["sparse"]]},
}
# Norms with 1 added, factors of frequencies and decays are rounded to float32 in files.
_ROUNDED = (
    "mamba",
    "falcon_mamba",
    "gemma",
    "llama3",
    "phi3 with",
    "jamba",
    "nemotron",
    "qwen3_5",
    "qwen3_next",
    "granite hybrid",
)


def family(directory: Path, name: str, **settings: Any) -> Path:
    model_type, known = settings_of(name)
    directory.mkdir(exist_ok=True)
    return make_family_model(directory, model_type, known | settings)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_is_what_quantization_makes_at_load(name: str, tmp_path: Path) -> None:
    model = family(tmp_path / "model", name, **FAMILIES[name])
    out = tmp_path / "model.gguf"
    recipe = "q4_0" if name == "mistral" else "q4_k_m"
    assert convert(model, out, recipe) == out.stat().st_size
    assert names(tmp_path) == ["model", "model.gguf"]
    expected = load_decoder(model, torch.float32, quantization=recipe)
    found = load_decoder(out, torch.float32)
    check_matrices(found, expected)
    text = [3, 5, 96, 4, 40, 41, 42, 2, 7, 9, 33]
    ours, theirs = logits(found, text), logits(expected, text)
    if name.startswith(_ROUNDED):
        # Each such number is off by one rounding, which adds up over the tokens of a state and the layers.
        layers = found.config.num_hidden_layers
        assert (ours - theirs).norm() < 2**-23 * len(text) * layers * theirs.norm()
    else:
        assert torch.equal(ours, theirs)
    check_with_the_package(out, expected)


def matrices_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The quantised ones by their names in its files, with the rows in the order that they have there."""
    found = {}
    for name, target in decoder.targets().items():
        if isinstance(target.into, GroupedWeight):
            assert target.taken is not None
            order = [row for rows in target.taken.rows for row in rows]
            rows = target.into.dense()[target.first : target.first + len(order)]
            found[name] = torch.empty_like(rows)
            found[name][order] = rows
    return found


def check_matrices(found: Decoder, expected: Decoder) -> None:
    """All are bit for bit those of a load, in the layout of files."""
    of_load = matrices_of(expected)
    in_layout = dict(of_load)
    for place, projection in found.projections():
        if not isinstance(projection, Linear):
            continue
        origins = [(f"{place}{name}", f"{place}{own}", rows) for name, own, rows in projection.origins()]
        for _, own, _ in origins:
            in_layout.pop(f"{own}.weight", None)
        for name, own, rows in origins:
            in_layout[f"{name}.weight"] = of_load[f"{own}.weight"][rows]
        if projection.inputs:
            # The blocks of these models are as wide as their heads, so that each has the same inputs.
            inputs = [one for part in projection.inputs for one in part]
            for name in projection.parts:
                in_layout[f"{place}{name}.weight"] = of_load[f"{place}{name}.weight"][:, inputs]
    matrices = matrices_of(found)
    assert matrices.keys() == in_layout.keys()
    for name, matrix in matrices.items():
        assert torch.equal(matrix, in_layout[name]), name


def check_with_the_package(out: Path, expected: Any) -> None:
    """The metadata that llama.cpp needs, and the values that the package reads."""
    reader = gguf.GGUFReader(out)
    architecture = reader.fields["general.architecture"].contents()
    assert architecture in gguf.MODEL_ARCH_NAMES.values()
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    known = gguf.MODEL_TENSORS[number]
    names = {gguf.TENSOR_NAMES[each] for each in known}
    embedding = None
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        parts = parts[:-1] if parts[-1] in ("weight", "bias") else parts
        kind = ".".join(["blk.{bid}", *parts[2:]]) if parts[0] == "blk" else parts[0]
        assert kind in names, tensor.name
        assert tensor.data_offset % 32 == 0
        if tensor.name == "token_embd.weight":
            embedding = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert embedding is not None
    assert np.array_equal(embedding, expected.embedding.dense().float().numpy())
    for key in ("general.file_type", "general.quantization_version", "tokenizer.ggml.model"):
        assert key in reader.fields


def test_the_recipe_is_that_of_llama_cpp(tmp_path: Path) -> None:
    model = family(tmp_path / "model", "llama", **_WIDE, num_hidden_layers=8)
    convert(model, tmp_path / "model.gguf", "q4_k_m")
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    more = [layer for layer in range(8) if types[f"blk.{layer}.attn_v.weight"] == "Q6_K"]
    assert more == [layer for layer in range(8) if types[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7], "the first and the last eighth, and each third one between"
    assert types["blk.1.attn_q.weight"] == types["blk.0.ffn_up.weight"] == "Q4_K"
    assert types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_bit_for_bit_those_of_a_load(recipe: str, tmp_path: Path) -> None:
    model = family(tmp_path / "model", "qwen3", **_WIDE)
    convert(model, tmp_path / "model.gguf", recipe)
    found = load_decoder(tmp_path / "model.gguf", torch.bfloat16)
    expected = load_decoder(model, torch.bfloat16, quantization=recipe)
    for name, target in expected.targets().items():
        other = found.targets()[name]
        if isinstance(target.into, GroupedWeight):
            assert isinstance(other.into, GroupedWeight) and other.into.form == target.into.form
        assert torch.equal(other.into.dense(), target.into.dense()), name


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_a_file_in_float32_becomes_what_its_directory_does(name: str, tmp_path: Path) -> None:
    """Rows of heads and factors of the rotation are what a file has in its own way."""
    model = family(tmp_path / "model", name, **_WIDE)
    plain = write_gguf(tmp_path / "plain.gguf", model, "f32")
    for source, out in ((model, "one.gguf"), (plain, "other.gguf")):
        convert(source, tmp_path / out, "q4_k_m")
    one, other = (
        {
            each.name: (each.tensor_type, each.data.tobytes())
            for each in gguf.GGUFReader(tmp_path / out).tensors
        }
        for out in ("one.gguf", "other.gguf")
    )
    assert one.keys() == other.keys()
    # The writer of this test computes them in another way.
    assert all(one[each] == other[each] for each in one if each != "rope_freqs.weight")


def write_text(directory: Path, vocabulary: Vocabulary, architecture: str, vocab_size: int) -> None:
    """A tokenizer.json and what is beside it."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.metadata.items()}
    text = read_text(metadata | {"general.architecture": architecture}, vocab_size, 1 << 30)
    (directory / "tokenizer.json").write_bytes(text.tokenizer_json)
    settings = dict(text.chat_template.special_tokens) | {"chat_template": "{{ messages }} \u00e9"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


VOCABULARIES: dict[str, tuple[str, Callable[[], Vocabulary]]] = {
    **{
        name: (name, lambda pre=pre: byte_level(pre))  # type: ignore[misc]
        for name, pre in PRE_TOKENIZER.items()
        if name != "qwen3moe"
    },
    "with tokens around": ("llama", lambda: byte_level("llama-bpe", add_bos_token=True, add_eos_token=True)),
    "digits": ("llama", lambda: byte_level("smollm")),
    "sentencepiece": ("llama", sentencepiece),
    "without a space": ("llama", lambda: sentencepiece(add_space_prefix=False)),
    "of gemma": ("gemma", sentencepiece),
}
TEXTS = ("Hello, world!", " it's 12345 \n\n\t x<|user|>y", "na\u00efve \u4f60\u597d \U0001f600", "")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokenizer_and_template_are_those_of_the_directory(name: str, tmp_path: Path) -> None:
    architecture, make = VOCABULARIES[name]
    vocabulary = make()
    size = len(vocabulary.metadata["tokens"]) + 3
    model = family(tmp_path / "model", architecture, vocab_size=size, **FAMILIES[architecture])
    write_text(model, vocabulary, architecture, size)
    convert(model, tmp_path / "model.gguf", "q8_0")
    before, after = (source_of(path).text(size, 1 << 30) for path in (model, tmp_path / "model.gguf"))
    assert dict(after.chat_template.sources) == {"default": "{{ messages }} \u00e9"}
    assert after.end_id == before.end_id is not None
    theirs, ours = (Tokenizer.from_str(each.tokenizer_json.decode()) for each in (before, after))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def damage(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_bytes())
    change(tokenizer)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


REFUSED_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "pre_tokenizer": lambda it: it.update(pre_tokenizer={"type": "Whitespace"}),
    "normalizer": lambda it: it.update(normalizer={"type": "Lowercase"}),
    "model.merges": lambda it: it["model"]["merges"].append(it["model"]["merges"][0]),
    "model": lambda it: it["model"].update(type="Unigram"),
    "post_processor": lambda it: it.update(post_processor={"type": "BertProcessing"}),
}


@pytest.mark.parametrize("part", REFUSED_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_written_is_refused_by_name(part: str, tmp_path: Path) -> None:
    vocabulary = byte_level("llama-bpe") if part != "model.merges" else sentencepiece()
    size = len(vocabulary.metadata["tokens"])
    model = family(tmp_path / "model", "llama", vocab_size=size)
    write_text(model, vocabulary, "llama", size)
    damage(model, REFUSED_TOKENIZERS[part])
    with pytest.raises(ModelError, match=rf"model: cannot be written as GGUF: {part}"):
        convert(model, tmp_path / "model.gguf", "q8_0")
    assert names(tmp_path) == ["model"]


_LAYERS = {"layer_types": ["linear_attention", "full_attention", *2 * ["linear_attention"]]}
REFUSED_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("qwen3_moe", {"norm_topk_prob": False, **_EXPERTS}, "experts"),
    "dense layers only": (
        "deepseek_v3",
        FAMILIES["deepseek_v3"] | {"first_k_dense_replace": 4},
        "a model of deepseek_v3 whose layers have no experts",
    ),
    "some dense layers": ("qwen3_moe with dense layers", {"norm_topk_prob": True, **_EXPERTS}, "layer 0 is"),
    "recurrent layers": (
        "qwen3_next",
        {**FAMILIES["qwen3_next"], **_LAYERS},
        "what layer 3 is",
    ),
    "multipliers": ("falcon_h1", {}, "logits_divisor|multipliers"),
    "family": ("bamba", {}, "model_type"),
    "layers without a rotation": (
        "smollm3",
        {"use_sliding_window": False, "sliding_window": None, "no_rope_layers": [1, 0, 1, 1]},
        "rope_parameters",
    ),
    "windows of qwen2": ("qwen2", {}, "sliding_window"),
    "scale of gemma": ("gemma2", {"tie_word_embeddings": True}, "attention_scale"),
    "head of gemma": ("gemma2", {"query_pre_attn_scalar": 32}, "tie_word_embeddings"),
    "pattern of gemma3": ("gemma3", {"query_pre_attn_scalar": 32}, "sliding_window"),
    "rotation": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type",
    ),
    "rows": ("llama", {"hidden_size": 80, "head_dim": 16}, "blocks of"),
    "ends": ("llama", {"eos_token_id": [2, 3, 4, 5]}, "eos_token_id"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_a_model_that_cannot_be_written_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, settings, said = REFUSED_MODELS[case]
    model = family(tmp_path / "model", name, **settings)
    with pytest.raises(ModelError, match=said):
        convert(model, tmp_path / "model.gguf", "q4_k_m")
    assert names(tmp_path) == ["model"]


def test_an_embedding_model_keeps_its_pooling(tmp_path: Path) -> None:
    """Or is not written: with another one its vectors would be wrong."""
    model, out = family(tmp_path / "model", "qwen3"), tmp_path / "model.gguf"
    pooled_by(model, {"pooling_mode": "mean"}, "Dense")
    with pytest.raises(ModelError, match=r"modules\.json: files of GGUF cannot say mean\+Dense"):
        convert(model, out, "q8_0")
    pooled_by(model, {"pooling_mode": "mean"})
    convert(model, out, "q8_0")
    assert source_of(out).text(97, 1 << 20).pooling == "mean"


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tmp_path / "model", tmp_path / "model.gguf"
    model.mkdir()
    make_model(model, TinyModel())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            convert(model, out, "q8_0")
    assert names(tmp_path) == ["model"]
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][5, 7] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight is not finite"):
        convert(model, out, "q4_k_m")
    assert names(tmp_path) == ["model"]
    tensors[name][5, 7] = 0.0
    save_file(tensors, model / "model.safetensors")

    def made_meanwhile(*_: int) -> None:
        out.write_text("mine")

    with pytest.raises(ModelError, match="is there already"):
        convert(model, out, "q8_0", made_meanwhile)
    assert names(tmp_path) == ["model", "model.gguf"]
    with pytest.raises(ModelError, match="is there already"):
        convert(model, out, "q8_0")
    assert out.read_text() == "mine"
