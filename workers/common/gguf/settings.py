"""Translates the metadata of a GGUF file to the settings of a config.json.

What a file of an architecture may say is in `workers.common.gguf.architectures`. Sources: the converters of
llama.cpp, which write the files, and its `llama_hparams`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    ARCHITECTURES,
    GPT_OSS,
    KV_HEADS,
    LATENT,
    MORE_LAYERS,
    NEEDED,
    WIDTH,
    WIDTH_OF_EXPERTS,
    Architecture,
    architecture_of,
    check_keys,
)
from workers.common.gguf.file_settings import FileSettings, ReadFactors
from workers.common.gguf.header import TensorInfo, Value, shown
from workers.common.gguf.own_settings import ROPE_FACTORS, of_architecture

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Types of tensors that can be served: `kernels.group_formats` has those that are quantised.
DENSE = frozenset({"f32", "f16", "bf16"})
QUANTISED = frozenset(
    {
        "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
        "mxfp4",
    }
)  # fmt: skip

TOKEN_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
# Control tokens that end a text where they are in a vocabulary, beside those that the metadata name.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
)  # fmt: skip
# <|end|> ends a message of gpt-oss, and not its text.
_ENDS_OF_GPT_OSS = ("<|return|>", "<|call|>", "<|endoftext|>")
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3
# There are lists of what each layer is, before any tensor is looked for.
_MOST_LAYERS = 1 << 12


def read_settings(
    metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo], read_factors: ReadFactors
) -> dict[str, object]:
    """The settings of a config.json.

    Args:
        metadata: Those of the file, with `tokenizer.ggml.tokens`.
        tensors: Its tensors, by their names there.
        read_factors: Reads a vector of float32.

    Raises:
        GgufError: A key is missing, invalid, or not known here, or a value is not supported.
    """
    name, architecture = architecture_of(metadata)
    own = {
        key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
    }
    check_keys(name, architecture, own)
    settings: dict[str, object] = {"model_type": architecture.model_type}
    file = FileSettings(name, own, settings, tensors, read_factors)
    eps, its_key = architecture.norm_eps
    for setting, key in (NEEDED | {eps: its_key}).items():
        if key not in own:
            raise GgufError(f"{name}.{key}: is missing")
        settings[setting] = _same(own[key], f"{name}.{key}")
    width = WIDTH_OF_EXPERTS if WIDTH not in own and WIDTH_OF_EXPERTS in architecture.keys else WIDTH
    if width not in own:
        raise GgufError(f"{name}.{width}: is missing")
    settings["intermediate_size"] = _same(_where_there(own[width], architecture), f"{name}.{width}")
    settings["num_hidden_layers"] = _layers(file)
    kv_heads = _where_there(own.get(KV_HEADS, own["attention.head_count"]), architecture)
    settings["num_key_value_heads"] = _same(kv_heads, f"{name}.{KV_HEADS}")
    settings["head_dim"] = _head_dim(file)
    settings["vocab_size"] = _vocab_size(tensors)
    settings["tie_word_embeddings"] = HEAD not in tensors
    settings["dtype"] = _dtype(tensors)
    settings |= _token_ids(metadata, _ENDS_OF_GPT_OSS if name == GPT_OSS else _ENDS)
    settings |= of_architecture(file)
    if architecture.rotates:
        settings |= _rope(file)
    return settings


def served_types(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The types of a model's tensors. Raises GgufError for one that cannot be served."""
    for info in tensors.values():
        if info.type not in DENSE | QUANTISED:
            known = ", ".join(sorted(DENSE | QUANTISED))
            instead = "use a file of another type, such as Q4_K_M"
            raise GgufError(f"tensor {info.name} must be one of {known}, got {info.type}: {instead}")
    return {info.type for info in tensors.values()}


def _same(value: Value, key: str) -> Value:
    """A number, also if the file has an equal one for each layer. Raises GgufError."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise GgufError(f"{key}: must be the same in all layers, got {shown(value)}")
    return value[0]


def _where_there(value: Value, architecture: Architecture) -> Value:
    """What a file has for each layer, of those layers that have such a part."""
    if architecture.varies and isinstance(value, list):
        return value[0] if value else 0
    if not architecture.recurrent_without_heads or not isinstance(value, list):
        return value
    return [each for each in value if each]  # type: ignore[return-value] # a list of one type


def _layers(file: FileSettings) -> int:
    """The number of layers that a forward needs. Raises GgufError."""
    name, more = file.name, file.own.get(MORE_LAYERS, 0)
    count = _same(file.own["block_count"], f"{name}.block_count")
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        raise GgufError(f"{name}.block_count: must be from 1 to {_MOST_LAYERS}, got {shown(count)}")
    if type(more) is not int or not 0 <= more < count:
        raise GgufError(f"{name}.{MORE_LAYERS}: must be fewer than {shown(count)} layers, got {shown(more)}")
    return count - more


def _head_dim(file: FileSettings) -> Value | None:
    """The width of a head, of latent attention what of it is rotated; None: it follows from others."""
    own, heads, hidden = file.own, file.settings["num_attention_heads"], file.settings["hidden_size"]
    if file.name == LATENT:
        return own.get("rope.dimension_count")
    key_length, value_length = own.get("attention.key_length"), own.get("attention.value_length")
    if value_length is not None and value_length != key_length:
        got = f"{shown(value_length)} and {shown(key_length)}"
        raise GgufError(f"{file.name}.attention.value_length: must be the key_length, got {got}")
    if key_length is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        return hidden // heads  # the config's check finds a remainder, by the shapes of tensors
    return key_length


def _vocab_size(tensors: Mapping[str, TensorInfo]) -> int:
    if EMBEDDING not in tensors:
        raise GgufError(f"tensor {EMBEDDING} is missing")
    shape = tensors[EMBEDDING].shape
    if len(shape) != 2:
        raise GgufError(f"tensor {EMBEDDING}: must be a matrix, has the shape {list(shape)}")
    return shape[0]


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype of the embedding and of what is not quantised; with quantised tensors bfloat16."""
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    types = {info.type for info in tensors.values()}
    return names[tensors[EMBEDDING].type] if types <= names.keys() else "bfloat16"


def _token_ids(metadata: Mapping[str, Value], ends: Collection[str]) -> dict[str, object]:
    """`ends`: control tokens that end a text wherever they are in a vocabulary."""
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS]
    found = [token_id for token_id in ids if type(token_id) is int]
    if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
        found += [
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL and token in ends
        ]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*dict.fromkeys(found)],
    }


def _rope(file: FileSettings) -> dict[str, object]:
    """The rotary embedding. Raises GgufError."""
    name, own = file.name, file.own
    found: dict[str, object] = {"rope_theta": own.get("rope.freq_base", 10_000.0)}
    head_dim = file.settings["head_dim"]
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated != head_dim and not ARCHITECTURES[name].rotates_parts:
        raise GgufError(f"{name}.rope.dimension_count: must be {shown(head_dim)}, got {shown(rotated)}")
    if rotated != head_dim and isinstance(rotated, int) and isinstance(head_dim, int):
        found["partial_rotary_factor"] = rotated / max(1, head_dim)
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind == "linear" and factor == 1.0:
        kind = "none"
    factors = {key: file.read_factors(file.tensors[key]) for key in FACTORS if key in file.tensors}
    attention_factor = own.get("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0 and (not factors or ROPE_FACTORS in factors):
        # llama.cpp multiplies it with the factor that follows from the scaling.
        got = f"without long factors, got {shown(attention_factor)}"
        raise GgufError(f"{name}.rope.scaling.attn_factor: is not supported {got}")
    original = own.get("rope.scaling.original_context_length", file.settings["max_position_embeddings"])
    if factors and kind in ("none", "longrope"):
        return found | _longrope(file, factors, original, attention_factor)
    if kind == "linear" and not factors:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and not factors:
        found["rope_scaling"] = {"rope_type": "yarn", "factor": factor} | _yarn(file, original)
    elif kind != "none":
        also = f" with {min(factors)}" if factors else ""
        raise GgufError(f"{name}.rope.scaling.type: is not supported{also}, got {shown(kind)}")
    return found


def _longrope(
    file: FileSettings, factors: Mapping[str, list[float]], original: Value, attention_factor: Value
) -> dict[str, object]:
    """All factors are divisors of the frequencies, which is what the library calls longrope."""
    is_long, longest = ROPE_FACTORS not in factors, file.settings["max_position_embeddings"]
    found: dict[str, object] = {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": factors.get(SHORT_FACTORS) if is_long else factors[ROPE_FACTORS],
            "long_factor": factors.get(LONG_FACTORS) if is_long else factors[ROPE_FACTORS],
            "original_max_position_embeddings": original if is_long else longest,
            "attention_factor": attention_factor,
        }
    }
    if is_long and file.name == "phi3":
        found["original_max_position_embeddings"] = original
    return found


def _yarn(file: FileSettings, original: Value) -> dict[str, object]:
    own = file.own
    found: dict[str, object] = {"original_max_position_embeddings": original}
    if file.name == GPT_OSS:
        found["truncate"] = False  # as its makers have it: no file says so
    scale = own.get("rope.scaling.yarn_log_multiplier")
    if isinstance(scale, float):
        # Both are the same in all models, with few digits; files of DeepSeek have a tenth, in float32.
        both = round(10 * scale if file.name == LATENT else scale, 6)
        found |= {"mscale": both, "mscale_all_dim": both}
    temperature = own.get("attention.temperature_scale")
    if temperature is not None:
        found["llama_4_scaling_beta"] = temperature
    for setting in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{setting}" in own:
            found[setting] = own[f"rope.scaling.yarn_{setting}"]
    return found
