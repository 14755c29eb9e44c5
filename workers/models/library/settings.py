"""Reads and checks the config.json of a model that the transformers library runs, before the model is built.

The library itself accepts any config. Oversized numbers, and models that paged KV does not support, are
refused here. Code in the directory is never read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from workers.common.quantised.methods import SETTING as QUANTISATION
from workers.models.errors import ModelError
from workers.models.files import errors_naming
from workers.models.library.errors import library_errors
from workers.models.source import ModelSource, source_of
from workers.models.text_part import WRAPPERS, text_part
from workers.models.values import names, token_ids

# Several times the sizes of the largest models: layers and heads, widths, positions that are only a limit,
# and any other integer. `loading` checks the size of tables of positions before they are built.
_MAX_LAYERS, _MAX_WIDTH, _MAX_POSITIONS, _MAX_INTEGER = 1 << 12, 1 << 20, 1 << 27, 1 << 24
# Numbers under these names are not sizes. Rotary bases, for example, are large.
_NOT_SIZES = ("theta", "token_id", "_base", "seed")

# Layers that store keys and values of tokens, an index of keys, compressed KV, a recurrent state or nothing.
# Others store more.
_KNOWN_LAYERS = names(
    """
    full_attention sliding_attention chunked_attention indexed_attention attention dense moe mlp
    linear_attention conv hybrid hybrid_sliding heavily_compressed_attention compressed_sparse_attention
    """
)

# The names of the longest sequence. Models without positions, or with ALiBi, may have none of them.
_LENGTHS = (
    "max_position_embeddings",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)
_DEFAULT_LENGTH = 2048

# The names of the number of experts, and of the number of experts for each token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """The settings of a model.

    Attributes:
        config: The config object of the library.
        model_class: The library's class of the causal language model.
        vocab_size: The number of tokens in the vocabulary.
        max_position_embeddings: The longest sequence that is served.
        eos_token_ids: Tokens that end a text.
        bos_token_id: The token that starts a text; None if the model names none.
        digest: The content of config.json, with sorted keys and normalised spacing.
        is_text_part: The directory has a multimodal model, and this is the config of its text part.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    digest: str
    is_text_part: bool


def read_settings(directory: Path) -> LibrarySettings:
    """Read the settings of a model; see `ModelConfig.from_directory`.

    Raises ModelError if a file is invalid, or the model is not supported.
    """
    source = source_of(directory)
    settings = source.settings()
    # A config may have any value under any name, and the library may raise any exception for it.
    with errors_naming(source.config_file), library_errors("read the config"):
        return _parse(source, settings)


def _parse(source: ModelSource, settings: dict[str, object]) -> LibrarySettings:
    digest = json.dumps(settings, sort_keys=True)
    is_text_part = settings.get("model_type") in WRAPPERS
    settings = dict(text_part(settings))
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(f"model_type: {model_type!r} is not known to the transformers library")
    for name in ("fusion_config", "distributed_config", "transformers_weights"):
        if settings.get(name):
            raise ModelError(f"{name}: is not supported by the transformers backend")
    settings = {
        name: value
        for name, value in _drop_oversized(settings, CONFIG_MAPPING[model_type]).items()
        if name != QUANTISATION and not name.lstrip("_").startswith(("attn_impl", "experts_impl"))
    }
    # The library's files store infinities as objects.
    decoded: Any = PreTrainedConfig._decode_special_floats(_with_plain_dtypes(settings))  # noqa: SLF001
    config = CONFIG_MAPPING[model_type].from_dict(decoded)
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise ModelError(f"text_config: must be an object, got {text!r}")
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise ModelError(
            f"model_type: {model_type} is an encoder with a decoder, but only decoders are supported"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model_type: {model_type} is no causal language model, nor a multimodal one whose text part is"
            " known"
        )
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    _check_causal(config, text)
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _KNOWN_LAYERS:
            raise ModelError(f"layer_types: {kind!r} stores what pages cannot hold, and is not supported")
    _check_experts(text)
    vocab_size = text.vocab_size
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ModelError(f"vocab_size: must be at least 2, got {vocab_size!r}")
    eos = token_ids({"eos_token_id": getattr(text, "eos_token_id", None)}, "eos_token_id", vocab_size)
    bos = token_ids({"bos_token_id": getattr(text, "bos_token_id", None)}, "bos_token_id", vocab_size)
    return LibrarySettings(
        config=config,
        model_class=model_class,
        vocab_size=vocab_size,
        max_position_embeddings=_max_seq_len(text),
        eos_token_ids=source.end_tokens(vocab_size) or eos,
        bos_token_id=next(iter(bos), None),
        digest=digest,
        is_text_part=is_text_part,
    )


def _drop_oversized(settings: Mapping[str, object], config_class: type[Any]) -> dict[str, object]:
    """The settings without oversized integers under names that the library does not know.

    Examples are the number of training tokens, and 10^30 as the limit of a tokenizer without one.

    Raises ModelError if an integer is oversized, and the library knows its name or no float can represent it.
    """
    kept: dict[str, object] = {}
    parts: Mapping[str, type[Any]] = getattr(config_class, "sub_configs", {})
    for name, value in settings.items():
        oversized = next(
            (found for found in _integers(name, value) if abs(found[1]) > _max_value(found[0])), None
        )
        if oversized is None:
            kept[name] = value
        elif name in parts and isinstance(value, Mapping):
            kept[name] = _drop_oversized(value, parts[name])
        elif _has_field(config_class, name) or abs(oversized[1]) > sys.float_info.max:
            raise ModelError(
                f"{oversized[0]}: must be at most {_max_value(oversized[0])}, got {oversized[1]}"
            )
    return kept


def _with_plain_dtypes(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with dtypes in the library's spelling: some configs have "torch.float32"."""
    plain: dict[str, object] = {}
    for name, value in settings.items():
        plain[name] = _with_plain_dtypes(value) if isinstance(value, Mapping) else value
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            plain[name] = value.removeprefix("torch.")
    return plain


def _max_value(name: str) -> float:
    """The largest integer that is allowed under a name."""
    if any(part in name for part in _NOT_SIZES):
        return math.inf
    if "layer" in name or "head" in name:
        return _MAX_LAYERS
    if "hidden" in name or "intermediate" in name or "label" in name:
        return _MAX_WIDTH
    return _MAX_POSITIONS if "position_embeddings" in name else _MAX_INTEGER


def _integers(name: str, value: object) -> Iterator[tuple[str, int]]:
    """The integers in a setting, nested ones included, each with its nearest key."""
    pending = [(name, value)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(name, inner) for inner in value]
        elif type(value) is int:
            yield name, value


def _has_field(config_class: type[Any], name: str) -> bool:
    """Whether a config has a field of this name. A class without declared fields has any name."""
    known = {field.name for field in fields(config_class)} if is_dataclass(config_class) else {name}
    return name in known or name in config_class.attribute_map


def _check_causal(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raises ModelError for a model whose tokens attend to later ones."""
    # Configs of decoders may also have `is_decoder` at its default of false, but no masked-language-model
    # class.
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(text, "is_decoder", None) is False:
        raise ModelError(
            f"is_decoder: false makes this {config.model_type} an encoder, but only decoders are supported"
        )
    for name in ("is_causal", "causal"):
        if getattr(text, name, None) is False:
            raise ModelError(f"{name}: must be true, since only decoders are supported")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError("use_bidirectional_attention: must be false, since only decoders are supported")


def _check_experts(text: PreTrainedConfig) -> None:
    """Raises ModelError for a model with experts that chooses none for a token."""
    if not any(getattr(text, name, None) for name in _EXPERTS):
        return
    for name in _EXPERTS_PER_TOKEN:
        per_token = getattr(text, name, None)
        if type(per_token) is int and per_token < 1:
            raise ModelError(f"{name}: must be at least 1, got {per_token}")


def _max_seq_len(text: PreTrainedConfig) -> int:
    """The longest sequence that can be served. Raises ModelError.

    With longrope, which rotates all keys differently beyond the original length, that length is the limit.
    """
    found = {name: length for name in _LENGTHS if type(length := getattr(text, name, None)) is int}
    name, longest = next(iter(found.items()), ("", _DEFAULT_LENGTH))
    if longest < 2:
        raise ModelError(f"{name}: must be at least 2, got {longest}")
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            # Keys in pages were rotated as in a short sequence.
            longest = min(longest, original) if isinstance(original, int) else longest
    return longest
