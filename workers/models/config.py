"""What a decoder needs to know about a model, from the config.json of a Hugging Face directory.

Reads the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5
(`rope_parameters`, `dtype`). Whatever the decoder would compute differently from what a config asks for is
refused here, so that a model that loads is a model that is right. Knows nothing of weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kernels.rope import RopeSpec, rope_frequencies
from workers.models.config_keys import check_keys, check_rope_keys
from workers.models.errors import ModelError
from workers.models.files import is_there, parse_object, read_whole
from workers.models.registry import family_of
from workers.models.values import boolean, integer, number, optional_number, token_ids

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")

_MAX_FILE_BYTES = 1 << 20

T = TypeVar("T")


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
        try:
            frequencies, factor = rope_frequencies(self.rope, self.head_dim)
        except (ValueError, ArithmeticError) as error:
            raise ModelError(f"rope_parameters: {error}") from error
        if not all(map(math.isfinite, (*frequencies.tolist(), factor))):
            raise ModelError(f"rope_parameters: make angles that are not finite, got {self.rope}")

    @classmethod
    def from_directory(cls, path: Path | str) -> ModelConfig:
        """Read config.json, and generation_config.json where there is one.

        As in transformers, the end tokens of generation_config.json replace those of config.json.

        Raises:
            ModelError: A file is missing or not JSON, or a setting is missing, wrong or not supported.
        """
        file = Path(path) / CONFIG_FILE
        config = _read(file, cls.from_settings)
        generation = Path(path) / GENERATION_CONFIG_FILE
        if not is_there(generation):
            return config
        eos = _read(generation, lambda settings: token_ids(settings, "eos_token_id", config.vocab_size))
        return dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)

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
        vocab_size = integer(settings, "vocab_size")
        hidden_size = integer(settings, "hidden_size")
        heads = integer(settings, "num_attention_heads")
        layers = integer(settings, "num_hidden_layers")
        max_positions = integer(settings, "max_position_embeddings")
        bias = boolean(settings, "attention_bias", default=False)
        return cls(
            model_type=str(settings["model_type"]),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=integer(settings, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=integer(settings, "num_key_value_heads", heads),
            head_dim=_head_dim(settings, hidden_size, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=number(settings, "rms_norm_eps", 1e-6),
            rope=_rope(settings, family.rope_theta, max_positions),
            tie_word_embeddings=boolean(settings, "tie_word_embeddings", default=False),
            attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=bias if family.output_bias is None else family.output_bias,
            qk_norm=family.qk_norm,
            layer_windows=_layer_windows(settings, layers, opt_in=family.windows_opt_in),
            eos_token_ids=token_ids(settings, "eos_token_id", vocab_size),
            bos_token_id=next(iter(token_ids(settings, "bos_token_id", vocab_size)), None),
            dtype=_dtype(settings),
        )


def _read(file: Path, read: Callable[[dict[str, object]], T]) -> T:
    """What `read` makes of the settings in a file. Raises ModelError, which names the file."""
    settings = parse_object(read_whole(file, _MAX_FILE_BYTES), file)
    try:
        return read(settings)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except RecursionError:  # from quoting a value that is nested as deeply as can just be parsed
        raise ModelError(f"{file}: is nested too deeply") from None


def _head_dim(settings: Mapping[str, object], hidden_size: int, heads: int) -> int:
    """The width of a head, by default an equal share of the hidden size. Raises ModelError."""
    if settings.get("head_dim") is None and hidden_size % heads:
        raise ModelError(
            f"hidden_size: must be a multiple of num_attention_heads, got {hidden_size} and {heads}"
        )
    return integer(settings, "head_dim", hidden_size // heads)


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
    theta = number(settings, "rope_theta", default_theta)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return RopeSpec(theta=number(parameters, "rope_theta", theta))
    try:
        return RopeSpec(
            theta=number(parameters, "rope_theta", theta),
            rope_type=str(rope_type),
            # Every scaled type has a factor; a missing one is a mistake, not 1.
            factor=number(parameters, "factor"),
            original_max_position_embeddings=integer(
                parameters, "original_max_position_embeddings", max_positions
            ),
            low_freq_factor=number(parameters, "low_freq_factor", 1.0),
            high_freq_factor=number(parameters, "high_freq_factor", 4.0),
            beta_fast=number(parameters, "beta_fast", 32.0),
            beta_slow=number(parameters, "beta_slow", 1.0),
            attention_factor=optional_number(parameters, "attention_factor"),
            mscale=optional_number(parameters, "mscale"),
            mscale_all_dim=optional_number(parameters, "mscale_all_dim"),
            truncate=boolean(parameters, "truncate", default=True),
        )
    except ValueError as error:
        raise ModelError(f"rope_parameters: {error}") from error


def _layer_windows(settings: Mapping[str, object], layers: int, *, opt_in: bool) -> tuple[int | None, ...]:
    """The sliding window of each layer. Raises ModelError."""
    if settings.get("sliding_window") is not None and not opt_in:
        # It would count whatever use_sliding_window says.
        raise ModelError("sliding_window: is not supported for this model_type")
    window = None
    if boolean(settings, "use_sliding_window", default=False) and settings.get("sliding_window") is not None:
        window = integer(settings, "sliding_window")
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


def _dtype(settings: Mapping[str, object]) -> str | None:
    """The number format of the weights, from either spelling. Raises ModelError."""
    value = settings.get("dtype") or settings.get("torch_dtype")
    if value in (None, "auto"):
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype: must be one of {', '.join(DTYPES)}, got {value!r}")
    return name
