"""What a decoder needs to know about a model, from the config.json of a Hugging Face directory.

Reads the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5
(`rope_parameters`, `dtype`). Whatever the decoder would compute differently from what a config asks for is
refused here, so that a model that loads is a model that is right. Knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.rope import RopeSpec
from workers.models.config_keys import check_keys, check_rope_keys
from workers.models.errors import ModelError
from workers.models.registry import family_of

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. Names are those of Hugging Face configs; sizes are in elements or tokens.

    Attributes:
        attention_bias: The q, k and v projections have a bias.
        attention_output_bias: The output projection of attention has a bias.
        qk_norm: Queries and keys are RMS-normalised per head.
        layer_windows: For each layer the positions a token sees, its own included; None: all of them.
        eos_token_ids: Tokens that end a text; empty where the model names none.
        bos_token_id: The token that starts a text; None where the model names none.
        dtype: Number format that the config names for the weights; None where it names none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None

    def __post_init__(self) -> None:
        """Check what no single setting shows.

        Raises:
            ModelError: Settings contradict each other.
        """
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads: must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim: must be even, got {self.head_dim}")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types: must have {self.num_hidden_layers} entries, got {len(self.layer_windows)}"
            )

    @classmethod
    def from_directory(cls, path: Path | str) -> ModelConfig:
        """Read config.json, and generation_config.json where there is one.

        As in transformers, the end tokens of generation_config.json replace those of config.json.

        Raises:
            ModelError: A file is missing or not JSON, or a setting is missing, wrong or not supported.
        """
        directory = Path(path)
        file = directory / CONFIG_FILE
        settings = dict(_read_json(file))
        generation = directory / GENERATION_CONFIG_FILE
        if generation.exists():
            eos = _read_json(generation).get("eos_token_id")
            if eos is not None:
                settings["eos_token_id"] = eos
        try:
            return cls.from_settings(settings)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from None

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> ModelConfig:
        """Read the settings of a config.json.

        Raises:
            ModelError: A setting is missing, wrong or not supported; the message names it.
        """
        family = family_of(settings.get("model_type"))
        activation = settings.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise ModelError(f"hidden_act: must be silu, got {activation!r}")
        check_keys(settings)
        hidden_size = _integer(settings, "hidden_size")
        heads = _integer(settings, "num_attention_heads")
        layers = _integer(settings, "num_hidden_layers")
        max_positions = _integer(settings, "max_position_embeddings")
        bias = _boolean(settings, "attention_bias", default=False)
        return cls(
            model_type=str(settings["model_type"]),
            vocab_size=_integer(settings, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(settings, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_integer(settings, "num_key_value_heads", heads),
            head_dim=_head_dim(settings, hidden_size, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=_number(settings, "rms_norm_eps", 1e-6),
            rope=_rope(settings, family.rope_theta, max_positions),
            tie_word_embeddings=_boolean(settings, "tie_word_embeddings", default=False),
            attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=bias if family.output_bias is None else family.output_bias,
            qk_norm=family.qk_norm,
            layer_windows=_layer_windows(settings, layers, opt_in=family.windows_opt_in),
            eos_token_ids=_token_ids(settings, "eos_token_id"),
            bos_token_id=next(iter(_token_ids(settings, "bos_token_id")), None),
            dtype=_dtype(settings),
        )


def _read_json(file: Path) -> Mapping[str, object]:
    """The object in a JSON file. Raises ModelError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return content


def _integer(settings: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A positive integer; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        got = "nothing" if value is None else repr(value)
        raise ModelError(f"{name}: must be a positive integer, got {got}")
    return value


def _number(settings: Mapping[str, object], name: str, default: float | None = None) -> float:
    """A positive number; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        got = "nothing" if value is None else repr(value)
        raise ModelError(f"{name}: must be a positive number, got {got}")
    return float(value)


def _optional_number(settings: Mapping[str, object], name: str) -> float | None:
    """A positive number, or None where it is absent, null or 0. Raises ModelError."""
    return _number(settings, name) if settings.get(name) else None


def _boolean(settings: Mapping[str, object], name: str, *, default: bool) -> bool:
    """True or false; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{name}: must be true or false, got {value!r}")
    return value


def _head_dim(settings: Mapping[str, object], hidden_size: int, heads: int) -> int:
    """The width of a head, by default an equal share of the hidden size. Raises ModelError."""
    if settings.get("head_dim") is None and hidden_size % heads:
        raise ModelError(
            f"hidden_size: must be a multiple of num_attention_heads, got {hidden_size} and {heads}"
        )
    return _integer(settings, "head_dim", hidden_size // heads)


def _rope(settings: Mapping[str, object], default_theta: float, max_positions: int) -> RopeSpec:
    """The rotary embedding, from either spelling. Raises ModelError."""
    # transformers lets the old spelling win where a config has both.
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"rope_parameters: must be an object, got {parameters!r}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("rope_parameters: separate parameters for each layer type are not supported")
    check_rope_keys(parameters)
    partial = parameters.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor: must be 1, got {partial!r}")
    theta = _number(settings, "rope_theta", default_theta)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return RopeSpec(theta=_number(parameters, "rope_theta", theta))
    try:
        return RopeSpec(
            theta=_number(parameters, "rope_theta", theta),
            rope_type=str(rope_type),
            # Every scaled type has a factor; a missing one is a mistake, not 1.
            factor=_number(parameters, "factor"),
            original_max_position_embeddings=_integer(
                parameters, "original_max_position_embeddings", max_positions
            ),
            low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
            high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
            beta_fast=_number(parameters, "beta_fast", 32.0),
            beta_slow=_number(parameters, "beta_slow", 1.0),
            attention_factor=_optional_number(parameters, "attention_factor"),
            mscale=_optional_number(parameters, "mscale"),
            mscale_all_dim=_optional_number(parameters, "mscale_all_dim"),
            truncate=_boolean(parameters, "truncate", default=True),
        )
    except ValueError as error:
        raise ModelError(f"rope_parameters: {error}") from error


def _layer_windows(settings: Mapping[str, object], layers: int, *, opt_in: bool) -> tuple[int | None, ...]:
    """The sliding window of each layer. Raises ModelError."""
    if settings.get("sliding_window") is not None and not opt_in:
        # It would count whatever use_sliding_window says.
        raise ModelError("sliding_window: is not supported for this model_type")
    window = None
    if _boolean(settings, "use_sliding_window", default=False) and settings.get("sliding_window") is not None:
        window = _integer(settings, "sliding_window")
    types = settings.get("layer_types")
    if types is None:
        # null and 0 differ here: with 0 every layer has the window.
        first = settings.get("max_window_layers")
        if window is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
            raise ModelError(f"max_window_layers: must be an integer >= 0, got {first!r}")
        return tuple(window if isinstance(first, int) and i >= first else None for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(layer_type not in known for layer_type in types):
        raise ModelError(f"layer_types: each must be one of {', '.join(known)}, got {types!r}")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _token_ids(settings: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Special tokens of one role: none, one or a list. Raises ModelError."""
    value = settings.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(f"{name}: must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


def _dtype(settings: Mapping[str, object]) -> str | None:
    """The number format of the weights, from either spelling. Raises ModelError."""
    value = settings.get("dtype") or settings.get("torch_dtype")
    if value in (None, "auto"):
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype: must be one of {', '.join(DTYPES)}, got {value!r}")
    return name
