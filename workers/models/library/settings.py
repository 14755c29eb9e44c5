"""The config.json of a model that the transformers library is to run: its class, and sizes that make sense.

The library takes a config as it is. What would make it build something absurd, or a model that pages
cannot serve, is refused here, before anything is built. Code that a directory brings is never looked at.
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

from workers.models.config_keys import QUANTIZATION, QUANTIZED
from workers.models.errors import ModelError
from workers.models.files import is_there, parse_object, read_whole
from workers.models.library.errors import library_errors
from workers.models.values import token_ids

_CONFIG_FILE = "config.json"
_GENERATION_CONFIG_FILE = "generation_config.json"
_MAX_FILE_BYTES = 1 << 20

# Several times what the largest models have; of layers and heads, of widths, of positions where these are no
# more than a bound, and of anything else. What positions make large is measured before it is built.
_MOST_LAYERS, _MOST_WIDTH, _MOST_POSITIONS, _MOST_OF_ANY = 1 << 12, 1 << 20, 1 << 27, 1 << 24
# Rotary bases are large numbers and make nothing large.
_NOT_SIZES = ("theta", "token_id", "_base", "seed")

# Layers that keep nothing but keys and values of tokens. Others keep a state that pages do not hold.
_PAGED_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "moe"}
)

# Under these names a config says how long its texts may be; some with ALiBi, which has no bound, do not.
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length")
_LENGTH_UNSAID = 2048

# How many experts there are, and how many of them a token goes through.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What a directory says of its model.

    Attributes:
        config: As the library has it.
        model_class: The library's class for it, with a head for the next token.
        vocab_size: Tokens.
        max_position_embeddings: The longest text that is served.
        eos_token_ids: Tokens that end a text.
        bos_token_id: The token that starts one; None where the model names none.
        digest: Of config.json, whatever its spacing and order.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    digest: str


def read_settings(directory: Path) -> LibrarySettings:
    """Read config.json, and generation_config.json where there is one.

    Raises:
        ModelError: The file, or what the model is, cannot be served.
    """
    file = directory / _CONFIG_FILE
    settings = parse_object(read_whole(file, _MAX_FILE_BYTES), file)
    try:
        # A config may have any value under any name, and what reads it raises whatever comes of that.
        with library_errors("read the config"):
            return _parse(directory, settings)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except RecursionError:
        raise ModelError(f"{file}: is nested too deeply") from None


def _parse(directory: Path, settings: dict[str, object]) -> LibrarySettings:
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(f"model_type: {model_type!r} is not known to the transformers library")
    if settings.get(QUANTIZATION):
        raise ModelError(QUANTIZED)
    for name in ("fusion_config", "distributed_config", "transformers_weights"):
        if settings.get(name):
            raise ModelError(f"{name}: is not supported by the transformers backend")
    digest = json.dumps(settings, sort_keys=True)
    settings = {
        name: value
        for name, value in _without_absurd(settings, CONFIG_MAPPING[model_type]).items()
        if name != QUANTIZATION and not name.lstrip("_").startswith(("attn_impl", "experts_impl"))
    }
    config = CONFIG_MAPPING[model_type].from_dict(_with_plain_dtypes(settings))
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise ModelError(f"text_config: must be an object, got {text!r}")
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise ModelError(
            f"model_type: {model_type} is an encoder with a decoder, and only decoders are served"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model_type: {model_type} is not a language model that continues a text")
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    _check_causal(config, text)
    _check_layers(model_type, text, model_class)
    _check_experts(text)
    vocab_size = text.vocab_size
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ModelError(f"vocab_size: must be at least 2, got {vocab_size!r}")
    eos = token_ids({"eos_token_id": text.eos_token_id}, "eos_token_id", vocab_size)
    bos = token_ids({"bos_token_id": text.bos_token_id}, "bos_token_id", vocab_size)
    return LibrarySettings(
        config=config,
        model_class=model_class,
        vocab_size=vocab_size,
        max_position_embeddings=_longest(text),
        eos_token_ids=_generation_eos(directory, vocab_size) or eos,
        bos_token_id=next(iter(bos), None),
        digest=digest,
    )


def _without_absurd(settings: Mapping[str, object], config_class: type[Any]) -> dict[str, object]:
    """The settings that the library may see: all but absurd numbers under names that it does not know.

    Such are how many tokens a training saw, or what a tokenizer takes for no limit (10^30).

    Raises:
        ModelError: A number under a name that it knows, with which something absurd would be built; or one
            that no float holds.
    """
    kept: dict[str, object] = {}
    parts: Mapping[str, type[Any]] = getattr(config_class, "sub_configs", {})
    for name, value in settings.items():
        absurd = next((found for found in _integers(name, value) if abs(found[1]) > _most(found[0])), None)
        if absurd is None:
            kept[name] = value
        elif name in parts and isinstance(value, Mapping):
            kept[name] = _without_absurd(value, parts[name])
        elif _knows(config_class, name) or abs(absurd[1]) > sys.float_info.max:
            raise ModelError(f"{absurd[0]}: must be at most {_most(absurd[0])}, got {absurd[1]}")
    return kept


def _with_plain_dtypes(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with dtypes as the library spells them: some configs have them as torch prints them."""
    plain: dict[str, object] = {}
    for name, value in settings.items():
        plain[name] = _with_plain_dtypes(value) if isinstance(value, Mapping) else value
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            plain[name] = value.removeprefix("torch.")
    return plain


def _most(name: str) -> float:
    """The largest number that makes sense under a name."""
    if any(part in name for part in _NOT_SIZES):
        return math.inf
    if "layer" in name or "head" in name:
        return _MOST_LAYERS
    if "hidden" in name or "intermediate" in name or "label" in name:
        return _MOST_WIDTH
    return _MOST_POSITIONS if "position_embeddings" in name else _MOST_OF_ANY


def _integers(name: str, value: object) -> Iterator[tuple[str, int]]:
    """The integers in a setting and what is nested in it, with the name of the nearest key."""
    pending = [(name, value)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(name, inner) for inner in value]
        elif type(value) is int:
            yield name, value


def _knows(config_class: type[Any], name: str) -> bool:
    """Whether a config has a field of this name. One that does not say is taken to know all."""
    known = {field.name for field in fields(config_class)} if is_dataclass(config_class) else {name}
    return name in known or name in config_class.attribute_map


def _check_causal(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raises ModelError for a model whose tokens see those that follow."""
    # Decoders too have an `is_decoder` that nobody sets; but no head that fills gaps.
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(text, "is_decoder", None) is False:
        raise ModelError(
            f"is_decoder: false makes this {config.model_type} an encoder, and only decoders are served"
        )
    if getattr(text, "is_causal", None) is False:
        raise ModelError("is_causal: must be true: only decoders are served")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError("use_bidirectional_attention: must be false: only decoders are served")


def _check_experts(text: PreTrainedConfig) -> None:
    """Raises ModelError for experts of which a token goes through none."""
    if not any(getattr(text, name, None) for name in _EXPERTS):
        return
    for name in _EXPERTS_PER_TOKEN:
        per_token = getattr(text, name, None)
        if type(per_token) is int and per_token < 1:
            raise ModelError(f"{name}: must be at least 1, got {per_token}")


def _check_layers(model_type: str, text: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raises ModelError for layers that keep more than keys and values."""
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _PAGED_LAYERS:
            raise ModelError(f"layer_types: {kind!r} keeps what pages do not hold, and is not supported")
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(
            f"model_type: {model_type} keeps a state that pages do not hold, and is not supported"
        )


def _longest(text: PreTrainedConfig) -> int:
    """The longest text: of a rotation that changes when a text grows beyond a length, that length.

    Raises ModelError.
    """
    said = {name: length for name in _LENGTHS if type(length := getattr(text, name, None)) is int}
    name, longest = next(iter(said.items()), ("", _LENGTH_UNSAID))
    if longest < 2:
        raise ModelError(f"{name}: must be at least 2, got {longest}")
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            # Keys that lie in pages were rotated as those of a short text.
            longest = min(longest, original) if isinstance(original, int) else longest
    return longest


def _generation_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The end tokens of generation_config.json, which replace those of config.json. Raises ModelError."""
    file = directory / _GENERATION_CONFIG_FILE
    if not is_there(file):
        return ()
    settings = parse_object(read_whole(file, _MAX_FILE_BYTES), file)
    try:
        return token_ids(settings, "eos_token_id", vocab_size)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
