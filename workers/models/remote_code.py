"""Translates directories with their own code (`trust_remote_code`) to model types of the library.

That code is never run. It is equivalent to a type of the library, with other names of settings and tensors,
and sometimes with fused queries, keys and values. Text parts of InternVL, as published by its makers, are of
such a type or of one of the library.

Sources: the converters of llama.cpp, and the code in the directories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workers.models.checkpoint import StoredTensor
from workers.models.errors import ModelError, UnsupportedError
from workers.models.row_ranges import RowRanges
from workers.models.values import boolean, integer, number

FUSED = ".self_attn.qkv_proj."
_INTERNVL, _TEXT = "internvl_chat", "llm_config"
# For configs without this setting. A separate head in the files takes precedence.
_DEFAULTS = {"tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class _Type:
    """The differences from a type of the library.

    Attributes:
        settings: Converts settings to those of the library's type.
        renamed: Replacements in names of tensors. All that match apply, in order.
        by_groups: Fused matrices have, for each key-value head, its queries, keys and values. Otherwise all
            queries come first, then all keys and all values.
    """

    settings: Callable[[Mapping[str, object]], dict[str, object]]
    renamed: tuple[tuple[str, str], ...] = ()
    by_groups: bool = False


def _exaone(settings: Mapping[str, object]) -> dict[str, object]:
    return {
        "model_type": "llama",
        "num_hidden_layers": integer(settings, "num_layers"),
        "rms_norm_eps": number(settings, "layer_norm_epsilon"),
        "hidden_act": settings.get("activation_function"),
    }


def _internlm2(settings: Mapping[str, object]) -> dict[str, object]:
    return {"model_type": "llama", "attention_bias": boolean(settings, "bias", default=True)}


def _minicpm(settings: Mapping[str, object]) -> dict[str, object]:
    if settings.get("sparse_config") is not None:
        raise UnsupportedError("sparse_config: attention to a part of a text is not supported")
    layers, width = integer(settings, "num_hidden_layers"), integer(settings, "hidden_size")
    return {
        "model_type": "granite",
        "embedding_multiplier": number(settings, "scale_emb", 1.0),
        "residual_multiplier": number(settings, "scale_depth", 1.0) / layers**0.5,
        "logits_scaling": width / integer(settings, "dim_model_base", 1),
        "attention_multiplier": (width / integer(settings, "num_attention_heads")) ** -0.5,
    }


def _qwen(settings: Mapping[str, object]) -> dict[str, object]:
    for name, only in _ONLY_QWEN.items():
        if settings.get(name, only) != only:
            raise UnsupportedError(f"{name}: must be {only}, got {settings[name]!r}")
    heads, length = integer(settings, "num_attention_heads"), integer(settings, "max_position_embeddings")
    return {
        "model_type": "qwen2",
        "intermediate_size": integer(settings, "intermediate_size") // 2,
        "num_key_value_heads": heads,
        "head_dim": integer(settings, "kv_channels"),
        # In longer texts, queries and rotary embeddings depend on the length of the text.
        "max_position_embeddings": integer(settings, "seq_length", length),
        "rms_norm_eps": number(settings, "layer_norm_epsilon"),
        "rope_theta": number(settings, "rotary_emb_base", 10_000.0),
        "hidden_act": "silu",
    }


# Settings of the first Qwen for which only one value is supported.
_ONLY_QWEN = {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True}
# Settings of ChatGLM for which only one value is supported.
_ONLY_GLM = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "rmsnorm": True,
}


def _chatglm(settings: Mapping[str, object]) -> dict[str, object]:
    for name, only in _ONLY_GLM.items():
        if settings.get(name, only) is not only:
            raise UnsupportedError(f"{name}: must be {only}, got {settings[name]!r}")
    grouped = boolean(settings, "multi_query_attention", default=False)
    heads = "multi_query_group_num" if grouped else "num_attention_heads"
    theta = 10_000.0 * number(settings, "rope_ratio", 1.0)
    return {
        "model_type": "glm",
        "vocab_size": integer(settings, "padded_vocab_size"),
        "num_hidden_layers": integer(settings, "num_layers"),
        "num_key_value_heads": integer(settings, heads),
        "head_dim": integer(settings, "kv_channels"),
        "intermediate_size": integer(settings, "ffn_hidden_size"),
        "max_position_embeddings": integer(settings, "seq_length"),
        "rms_norm_eps": number(settings, "layernorm_epsilon"),
        "attention_bias": boolean(settings, "add_qkv_bias", default=False),
        "pad_token_id": settings.get("pad_token_id"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
    }


_TYPES: Mapping[str, _Type] = {
    "kimi_k2": _Type(lambda _: {"model_type": "deepseek_v3"}),
    "mimo": _Type(lambda _: {"model_type": "qwen2"}),
    "exaone": _Type(
        _exaone,
        (
            ("transformer.h.", "model.layers."),
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
            (".attn.attention.out_proj.", ".self_attn.o_proj."),
            (".attn.attention.", ".self_attn."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".mlp.c_fc_0.", ".mlp.gate_proj."),
            (".mlp.c_fc_1.", ".mlp.up_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
        ),
    ),
    "internlm2": _Type(
        _internlm2,
        (
            ("model.tok_embeddings.", "model.embed_tokens."),
            ("output.weight", "lm_head.weight"),
            (".attention.wo.", ".self_attn.o_proj."),
            (".attention_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".feed_forward.w1.", ".mlp.gate_proj."),
            (".feed_forward.w2.", ".mlp.down_proj."),
            (".feed_forward.w3.", ".mlp.up_proj."),
            (".attention.wqkv.", FUSED),
        ),
        by_groups=True,
    ),
    "minicpm": _Type(_minicpm),
    "qwen": _Type(
        _qwen,
        (
            ("transformer.h.", "model.layers."),
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
            (".attn.c_proj.", ".self_attn.o_proj."),
            (".attn.c_attn.", FUSED),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".mlp.w1.", ".mlp.up_proj."),
            (".mlp.w2.", ".mlp.gate_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
        ),
    ),
    "chatglm": _Type(
        _chatglm,
        (
            ("transformer.embedding.word_embeddings.", "model.embed_tokens."),
            ("transformer.encoder.layers.", "model.layers."),
            ("transformer.encoder.final_layernorm.", "model.norm."),
            ("transformer.output_layer.", "lm_head."),
            ("transformer.rotary_pos_emb.", "model.rotary_emb."),
            (".self_attention.dense.", ".self_attn.o_proj."),
            (".mlp.dense_h_to_4h.", ".mlp.gate_up_proj."),
            (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
            (".self_attention.query_key_value.", FUSED),
        ),
    ),
}


def library_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Translates the settings of a config.json to a type of the library. Raises ModelError."""
    text = settings.get(_TEXT)
    if settings.get("model_type") == _INTERNVL and isinstance(text, Mapping):
        return {**settings, "model_type": "internvl", "text_config": _as_library_type(text)}
    return _as_library_type(settings)


def _as_library_type(settings: Mapping[str, object]) -> dict[str, object]:
    known = _TYPES.get(str(settings.get("model_type")))
    return dict(settings) if known is None else _DEFAULTS | dict(settings) | known.settings(settings)


def library_tensors(
    tensors: Mapping[str, StoredTensor], settings: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """The tensors of a directory by their names in a checkpoint of the library's type.

    Args:
        tensors: The tensors of the text part, by their names in the files.
        settings: The settings of the config.json.

    Raises:
        ModelError: Two tensors get the same name, or the rows of a matrix do not fit the config.
    """
    text = settings.get(_TEXT) if settings.get("model_type") == _INTERNVL else settings
    known = _TYPES.get(str(text.get("model_type"))) if isinstance(text, Mapping) else None
    if known is None or not isinstance(text, Mapping):
        return dict(tensors)
    found: dict[str, StoredTensor] = {}
    for name, entry in tensors.items():
        new = name
        for before, after in known.renamed:
            new = new.replace(before, after, 1)
        if new in found:
            raise ModelError(f"{entry.file}: tensor {entry.name} is also there as {found[new].name}")
        found[new] = entry
    return split_fused_qkv(found, _as_library_type(text), by_groups=known.by_groups)


def split_fused_qkv(
    tensors: Mapping[str, StoredTensor], settings: Mapping[str, object], *, by_groups: bool = False
) -> dict[str, StoredTensor]:
    """Replaces each fused tensor of queries, keys and values by three.

    Args:
        tensors: The tensors by their names in a checkpoint of the library, with `FUSED` for all three.
        settings: The settings of a type of the library.
        by_groups: See `_Type`.

    Raises:
        ModelError: A projection is there twice, or the rows of a matrix do not fit the config.
    """
    found: dict[str, StoredTensor] = {}
    for name, entry in tensors.items():
        if FUSED not in name:
            found[name] = entry
            continue
        parts = _rows(settings, by_groups=by_groups)
        rows = sum(len(each) for ranges in parts.values() for each in ranges)
        if entry.shape[:1] != (rows,):
            shapes = f"shape {list(entry.shape)}, but the config asks for {rows} rows"
            raise ModelError(f"{entry.file}: tensor {entry.name} has {shapes}")
        for part, ranges in parts.items():
            new = name.replace(FUSED, f".self_attn.{part}.")
            if new in tensors:
                raise ModelError(f"{entry.file}: tensor {entry.name} is also there as {tensors[new].name}")
            found[new] = RowRanges(entry, *ranges)
    return found


def _rows(settings: Mapping[str, object], *, by_groups: bool) -> dict[str, list[range]]:
    """The rows of each projection in a fused matrix. Raises ModelError."""
    heads = integer(settings, "num_attention_heads")
    kv_heads = integer(settings, "num_key_value_heads", heads)
    width = integer(settings, "head_dim", integer(settings, "hidden_size") // heads)
    sizes = {"q_proj": heads // kv_heads, "k_proj": 1, "v_proj": 1}
    groups = kv_heads if by_groups else 1
    found: dict[str, list[range]] = {part: [] for part in sizes}
    begin = 0
    for _ in range(groups):
        for part, size in sizes.items():
            rows = size * width * (kv_heads // groups)
            found[part].append(range(begin, begin + rows))
            begin += rows
    return found
