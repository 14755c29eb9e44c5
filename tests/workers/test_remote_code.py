"""Directories whose models have code of their own: what the library computes, under other names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import quantised_directories as make
from tests.model_factory import hf_model, load_decoder, make_family_model
from tests.workers.test_gguf_models import logits
from tests.workers.test_quantised_directories import matrices
from workers.executors.loading import AUTO, NATIVE, TRANSFORMERS, choose_backend, load_served
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.library.library_model import LibraryModel

TOKENS = [3, 14, 15, 92, 65, 35, 8, 9]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_COMMON = {"hidden_size": 64, "num_attention_heads": 4, "auto_map": {"AutoModel": "modeling.Model"}}
_PLAIN = {name: SIZES[name] for name in SIZES if name != "num_attention_heads"} | _COMMON

Names = tuple[tuple[str, str], ...]
Fuse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def one_after_the_other(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def by_groups(*parts: torch.Tensor) -> torch.Tensor:
    """The queries of a key-value head, its keys and its values."""
    return torch.cat([part.view(2, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


# By the type of a directory: that of the library with its settings, the settings of the directory, and its
# names of tensors by those of the library.
TYPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Names, tuple[str, Fuse] | None]] = {
    "exaone": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
        {name: value for name, value in _PLAIN.items() if name not in ("num_hidden_layers", "rms_norm_eps")}
        | {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}
        | {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
        (
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.o_proj", "attn.attention.out_proj"),
            ("self_attn", "attn.attention"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ),
        None,
    ),
    "internlm2": (
        "llama",
        {"rope_theta": 1e6},
        _PLAIN
        | {"bias": False, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False}
        | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        (
            ("model.embed_tokens", "model.tok_embeddings"),
            ("lm_head", "output"),
            ("self_attn.o_proj", "attention.wo"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("mlp.up_proj", "feed_forward.w3"),
        ),
        ("attention.wqkv", by_groups),
    ),
    "minicpm": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 64 / 32,
            "attention_multiplier": 0.25,
        },
        _PLAIN
        | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "tie_word_embeddings": False}
        | {"hidden_act": "silu"},
        (),
        None,
    ),
    "qwen": (
        "qwen2",
        {"num_key_value_heads": 4, "rope_theta": 1e6},
        _PLAIN
        | {"intermediate_size": 192, "kv_channels": 16, "layer_norm_epsilon": 1e-5, "rotary_emb_base": 1e6}
        | {"seq_length": 128, "no_bias": True, "use_logn_attn": True, "tie_word_embeddings": False},
        (
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("self_attn", "attn"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("gate_proj", "w2"),
            ("up_proj", "w1"),
            ("mlp.down_proj", "mlp.c_proj"),
        ),
        ("attn.c_attn", one_after_the_other),
    ),
    "chatglm": (
        "glm",
        {
            "head_dim": 16,
            "attention_bias": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
        _COMMON
        | {"num_layers": 2, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 16}
        | {"ffn_hidden_size": 96, "seq_length": 256, "padded_vocab_size": 97, "layernorm_epsilon": 1e-5}
        | {"rope_ratio": 500, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True}
        | {"post_layer_norm": True, "tie_word_embeddings": False},
        (
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.layers.", "transformer.encoder.layers."),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("lm_head", "transformer.output_layer"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        ("self_attention.query_key_value", one_after_the_other),
    ),
}
_PROJECTION = re.compile(r"self_attn\.([qkv])_proj")


def published(directory: Path, kind: str) -> tuple[Path, torch.Tensor]:
    """A directory as its makers publish it, and the logits of the library's model."""
    model_type, settings, said, names, fused = TYPES[kind]
    source = make_family_model(
        directory / "library", model_type, {"tie_word_embeddings": False} | SIZES | settings
    )
    with torch.inference_mode():
        expected: torch.Tensor = hf_model(source)(torch.tensor([TOKENS])).logits[0]
    tensors = {name: each for file in source.glob("*.safetensors") for name, each in load_file(file).items()}
    found = {}
    for name, tensor in tensors.items():
        new, taken = name, tensor
        if fused is not None and (part := _PROJECTION.search(name)):
            if part[1] != "q":
                continue
            each = [tensors[_PROJECTION.sub(f"self_attn.{one}_proj", name)] for one in "qkv"]
            new, taken = _PROJECTION.sub(fused[0], name), fused[1](*each)
        for before, after in names:
            new = new.replace(before, after)
        found[new] = taken.contiguous()
    made = directory / "published"
    made.mkdir()
    save_file(found, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(said | {"model_type": kind}))
    return made, expected


@pytest.mark.parametrize("kind", TYPES)
def test_it_computes_what_a_type_of_the_library_does(kind: str, tmp_path: Path) -> None:
    directory, expected = published(tmp_path, kind)
    backend = TRANSFORMERS if kind == "chatglm" else NATIVE
    assert choose_backend(directory, AUTO).backend == backend
    options = directory, "float32", torch.device("cpu"), None
    model, _ = load_served(*options, backend=backend, self_check=True)
    if isinstance(model, LibraryModel):
        found = model.plain_logits(torch.tensor(TOKENS))
    else:
        assert isinstance(model, Decoder)
        found = logits(load_decoder(directory, "float32"), TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_fused_matrix_that_is_quantised_is_taken_apart(tmp_path: Path) -> None:
    directory, _ = published(tmp_path, "internlm2")
    meant = make.gptq(directory)
    loaded = matrices(load_decoder(directory, "float32"))
    fused = meant["model.layers.1.attention.wqkv.weight"].view(2, 4, 16, -1)
    parts = {"q": fused[:, :2], "k": fused[:, 2:3], "v": fused[:, 3:]}
    for part, values in parts.items():
        assert torch.equal(loaded[f"model.layers.1.self_attn.{part}_proj.weight"], values.flatten(0, 2)), part


def test_the_text_part_of_internvl_as_its_makers_publish_it(tmp_path: Path) -> None:
    directory, expected = published(tmp_path, "internlm2")
    config, file = directory / "config.json", directory / "model.safetensors"
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "internvl_chat", "llm_config": text, "vision_config": {}}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    others = {"vision_model.embeddings.class_embedding": torch.ones(1, 1, 8), "mlp1.0.weight": torch.ones(8)}
    save_file(tensors | others, file)
    torch.testing.assert_close(
        logits(load_decoder(directory, "float32"), TOKENS), expected, rtol=1e-4, atol=1e-5
    )


def test_a_projection_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    directory, _ = published(tmp_path, "internlm2")
    file = directory / "model.safetensors"
    twice = {"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 64)}
    save_file(load_file(file) | twice, file)
    with pytest.raises(ModelError, match=r"attention\.wqkv\.weight is also there as .*q_proj\.weight"):
        load_decoder(directory)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("exaone", {"num_layers": None}, "num_layers: must be a positive integer, got nothing"),
        ("minicpm", {"sparse_config": {}}, "sparse_config: attention to a part of a text is not supported"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm: must be True, got False"),
        ("internlm2", {"num_key_value_heads": 4}, r"has shape \[128, 64\], but the config asks for 192 rows"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    kind: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    directory, _ = published(tmp_path, kind)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=says) as raised:
        load_decoder(directory)
    assert str(directory) in str(raised.value)
