"""Reads the config.json of a Hugging Face directory into a `ModelConfig`, from which a decoder is built.

Reads the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5
(`rope_parameters`, `dtype`). A config that the decoder would compute differently is refused here, so that
each model that loads gives correct results. Does not read weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.gated_activation import GATE_LIMIT, SIGMOID_GAIN, UNGATED, Activation
from kernels.rope import RopeSpec, rope_frequencies
from workers.models.config_keys import settings_read
from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import EXPERTS, FULL, MLP, SLIDING, Family
from workers.models.files import errors_naming
from workers.models.latent_settings import LatentConfig, latent_attention_scale, read_latent
from workers.models.layer_settings import ExpertsConfig, read_experts, read_layer_types, sparse_layers
from workers.models.multipliers import ALL_ONE, Multipliers, read_multipliers
from workers.models.recurrent_settings import RecurrentConfig, read_recurrent
from workers.models.registry import family_of
from workers.models.respelled import rope_layers
from workers.models.rope_settings import max_seq_len, read_ropes, rotary_dim
from workers.models.source import source_of
from workers.models.text_part import WRAPPERS, text_part
from workers.models.values import boolean, integer, number, optional_number, token_ids

DTYPES = ("float32", "bfloat16", "float16")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings of one layer.

    Attributes:
        window: The number of positions that a token attends to, its own included; None: all.
        rope: The rotary embedding of queries and keys; None: they are not rotated.
        sparse: Whether it has experts instead of an MLP.
        attention: Whether it has attention.
        recurrent: Whether it has a recurrent state.
        feed_forward: Whether it has an MLP or experts.
    """

    window: int | None
    rope: RopeSpec | None
    sparse: bool = False
    attention: bool = True
    recurrent: bool = False
    feed_forward: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. Names are those of Hugging Face configs; sizes are in elements or tokens.

    Attributes:
        rotary_dim: The number of rotated elements of a head, which are the first ones.
        layers: The settings of each layer. With `has_mtp_head` the last one is the head's layer.
        experts: The experts of the sparse layers; None if there are none.
        latent: The widths of latent attention; None: ordinary attention. With it there is one key-value head,
            and a head is as wide as a token's data in pages.
        attention_bias: The q, k and v projections have a bias.
        attention_output_bias: The output projection of attention has a bias.
        mlp_bias: The projections of the MLP have a bias.
        recurrent: The settings of layers with a recurrent state; None if there are none.
        activation: The activation of the gate, in the MLP and in experts.
        attention_scale: Multiplies the attention scores.
        attention_softcap: Bounds the attention scores; None: no bound.
        logits_softcap: Bounds the logits; None: no bound.
        logits_divisor: Divides the logits.
        embedding_scale: Multiplies the embeddings.
        residual_scale: Multiplies the output of a sublayer before it is added to the residual stream.
        multipliers: The factors of projections' outputs.
        eos_token_ids: Tokens that end a text; empty if the model names none.
        bos_token_id: The token that starts a text; None if the model names none.
        dtype: The dtype that the config names for the weights; None if it names none.
        wrapper: The model_type of the multimodal model that this is the text part of; None: there is none.
        gguf_layout: Whether tensors have the names and row order of GGUF files; see `Family`.
        has_mtp_head: Whether the model drafts with its own MTP head; see `with_mtp_head`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    recurrent: RecurrentConfig | None = None
    latent: LatentConfig | None = None
    activation: Activation = "silu"
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    multipliers: Multipliers = ALL_ONE
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    wrapper: str | None = None
    gguf_layout: bool = False
    # Not part of the fingerprint, since it changes no text.
    has_mtp_head: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Check that settings are consistent. Raises ModelError."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads: must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.rotary_dim % 2:
            raise ModelError(f"head_dim: must be even, got {self.head_dim}")
        if len(self.body_layers) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types: must have {self.num_hidden_layers} entries, got {len(self.layers)}"
            )
        if not any(layer.attention or layer.recurrent for layer in self.layers):
            raise UnsupportedError("layer_types: at least one must be attention, or what is in its place")
        for rope in self.ropes:
            try:
                frequencies, factor = rope_frequencies(rope, self.rotary_dim)
            except (ValueError, ArithmeticError) as error:
                raise ModelError(f"rope_parameters: {error}") from error
            if not all(map(math.isfinite, (*frequencies.tolist(), factor))):
                raise ModelError(f"rope_parameters: the frequencies are not finite, got {rope}")

    @property
    def body_layers(self) -> tuple[LayerConfig, ...]:
        """The layers of the model without that of the MTP head."""
        return self.layers[:-1] if self.has_mtp_head else self.layers

    @property
    def with_mtp_head(self) -> ModelConfig:
        """The config of the model with its MTP head, which is one more layer with full attention.

        Raises UnsupportedError if there is no native code for one.
        """
        attending = next((layer for layer in reversed(self.layers) if layer.attention), None)
        if attending is None or not self.family.mtp_names:
            raise UnsupportedError(f"a {self.model_type} model has no head for multi-token prediction")
        own = dataclasses.replace(attending, sparse=self.layers[-1].sparse)
        return dataclasses.replace(self, layers=(*self.layers, own), has_mtp_head=True)

    @property
    def body(self) -> ModelConfig:
        """The config of the model without the MTP head."""
        return dataclasses.replace(self, layers=self.body_layers, has_mtp_head=False)

    @property
    def ropes(self) -> frozenset[RopeSpec]:
        """The rotary embeddings of all layers, each once."""
        return frozenset(layer.rope for layer in self.layers if layer.rope is not None)

    @property
    def last_mixer(self) -> int:
        """The last layer in which rows read other rows. After it only the wanted rows are computed."""
        return max(index for index, layer in enumerate(self.layers) if layer.attention or layer.recurrent)

    @property
    def attends(self) -> bool:
        """Whether any layer has attention. If not, the settings of heads have no meaning."""
        return any(layer.attention for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(layer.recurrent for layer in self.layers)

    @property
    def family(self) -> Family:
        return family_of(self.model_type)

    @classmethod
    def from_directory(cls, path: Path | str) -> ModelConfig:
        """Read a model's settings: config.json and, if it exists, generation_config.json; or a GGUF file.

        Raises ModelError if a file is missing or not JSON, or a setting is missing, invalid or not supported.
        """
        source = source_of(path)
        settings = source.settings()
        with errors_naming(source.config_file):
            config = cls.from_settings(settings)
        eos = source.end_tokens(config.vocab_size)
        return dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> ModelConfig:
        """Read the settings of a config.json.

        Raises ModelError if a setting is missing, invalid or not supported; the message names it.
        """
        wrapper = settings.get("model_type")
        if not isinstance(wrapper, str):  # the library would not know it, and its import takes seconds
            raise ModelError(f"model_type: must be the name of a model family, got {wrapper!r}")
        settings = text_part(settings)
        family = family_of(settings.get("model_type"))
        settings = family.respelled({**family.defaults, **settings_read(settings, family)})
        hidden_size = integer(settings, "hidden_size")
        heads = integer(settings, "num_attention_heads")
        head_dim = _head_dim(settings, hidden_size, heads)
        vocab_size = integer(settings, "vocab_size")
        layers = _layers(settings, family)
        latent = read_latent(settings) if family.latent_attention else None
        kind = family.recurrent if any(layer.recurrent for layer in layers) else None
        bias = boolean(settings, "attention_bias", default=False)
        mlp_bias = boolean(settings, "mlp_bias", default=False)
        return cls(
            model_type=str(settings["model_type"]),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=integer(settings, "intermediate_size"),
            num_hidden_layers=integer(settings, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=integer(settings, "num_key_value_heads", heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim(settings, family, head_dim) if latent is None else latent.rotated,
            max_position_embeddings=max_seq_len(settings, (layer.rope for layer in layers)),
            rms_norm_eps=number(settings, "rms_norm_eps", 1e-6),
            tie_word_embeddings=boolean(settings, "tie_word_embeddings", default=False),
            layers=layers,
            experts=read_experts(settings, family) if any(layer.sparse for layer in layers) else None,
            attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
            recurrent=None if kind is None else read_recurrent(settings, kind),
            latent=latent,
            activation=_activation(settings, family),
            attention_scale=_attention_scale(settings, head_dim)
            if latent is None
            else latent_attention_scale(latent, layers[0].rope),
            attention_softcap=_family_number(family, "attn_logit_softcapping", settings),
            logits_softcap=_family_number(family, "final_logit_softcapping", settings),
            logits_divisor=number(settings, "logits_scaling", 1.0),
            embedding_scale=_embedding_scale(settings, family, hidden_size),
            residual_scale=number(settings, "residual_multiplier", 1.0),
            multipliers=read_multipliers(settings),
            eos_token_ids=token_ids(settings, "eos_token_id", vocab_size),
            bos_token_id=next(iter(token_ids(settings, "bos_token_id", vocab_size)), None),
            dtype=_dtype(settings),
            wrapper=wrapper if wrapper in WRAPPERS else None,
            gguf_layout=boolean(settings, "gguf_layout", default=False),
        )


def _layers(settings: Mapping[str, object], family: Family) -> tuple[LayerConfig, ...]:
    """The settings of each layer. Raises ModelError."""
    count = integer(settings, "num_hidden_layers")
    window = None
    if "sliding_window" in family.reads and settings.get("sliding_window") is not None:
        enabled = not family.windows_opt_in or boolean(settings, "use_sliding_window", default=False)
        window = integer(settings, "sliding_window") if enabled else None
    types = read_layer_types(settings, family, count, windowed=window is not None)
    ropes = read_ropes(settings, family)
    sparse = sparse_layers(settings, family, count)
    return tuple(
        LayerConfig(
            window=window if layer_type == SLIDING else None,
            rope=ropes[layer_type] if rotated and layer_type in ropes else None,
            sparse=is_sparse,
            attention=layer_type in (FULL, SLIDING),
            recurrent=family.side_by_side or layer_type not in (FULL, SLIDING, MLP, EXPERTS),
            feed_forward=layer_type in (MLP, EXPERTS) or not family.one_sublayer,
        )
        for layer_type, rotated, is_sparse in zip(types, rope_layers(settings, count), sparse, strict=True)
    )


def _activation(settings: Mapping[str, object], family: Family) -> Activation:
    """The activation of the gate. Raises ModelError, or UnsupportedError."""
    if family.clamped_gate:
        for setting, only in (("swiglu_alpha", SIGMOID_GAIN), ("swiglu_limit", GATE_LIMIT)):
            if (got := number(settings, setting, only)) != only:
                raise UnsupportedError(f"{setting}: must be {only}, got {got}")
        return "clamped_swiglu"
    name = settings.get(family.activation) or "silu"
    if not family.gated_mlp:
        if name != UNGATED:
            raise UnsupportedError(f"{family.activation}: must be {UNGATED}, got {name!r}")
        return UNGATED
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(f"{family.activation}: must be one of {known}, got {name!r}")
    # The first configs of Gemma say gelu, but mean its approximation, also in transformers.
    legacy = name == "gelu" and settings.get("model_type") == "gemma"
    return "gelu_tanh" if legacy else _ACTIVATIONS[name]


def _attention_scale(settings: Mapping[str, object], head_dim: int) -> float:
    """The factor of the attention scores. Raises ModelError."""
    if settings.get("attention_multiplier") is not None:
        return number(settings, "attention_multiplier")
    return float(number(settings, "query_pre_attn_scalar", head_dim) ** -0.5)


def _embedding_scale(settings: Mapping[str, object], family: Family, hidden_size: int) -> float:
    """The factor of the embeddings. Raises ModelError."""
    return hidden_size**0.5 if family.scales_embeddings else number(settings, "embedding_multiplier", 1.0)


def _family_number(family: Family, name: str, settings: Mapping[str, object]) -> float | None:
    """A number that only some families read. None: absent, null or 0. Raises ModelError."""
    return optional_number(settings, name) if name in family.reads else None


def _head_dim(settings: Mapping[str, object], hidden_size: int, heads: int) -> int:
    """The width of a head; the default is hidden_size / num_attention_heads. Raises ModelError."""
    if settings.get("head_dim") is None and hidden_size % heads:
        raise ModelError(
            f"hidden_size: must be a multiple of num_attention_heads, got {hidden_size} and {heads}"
        )
    return integer(settings, "head_dim", hidden_size // heads)


def _dtype(settings: Mapping[str, object]) -> str | None:
    """The dtype of the weights, from either spelling. Raises ModelError."""
    value = settings.get("torch_dtype") if settings.get("dtype") is None else settings["dtype"]
    if value in (None, "auto"):
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype: must be one of {', '.join(DTYPES)}, got {value!r}")
    return name
