"""The model families that have native code, by the `model_type` of their config.

A family says what its config.json does not: what the library assumes of settings that are left out, and how
it differs from the others in structure. To add one whose structure is there, add an entry.

Sources: the configuration_*.py and modeling_*.py of transformers 5.23. `tests/workers/test_families.py`
compares the defaults with them, and the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from workers.models.errors import ModelError, UnsupportedError
from workers.models.values import count, integer

FULL, SLIDING = "full_attention", "sliding_attention"

LayerTypes = Callable[[Mapping[str, object], int], list[str]]
"""From the settings and the number of layers to the type of each layer, where `layer_types` is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Where a layer normalises rows, by the names of the norms in a checkpoint. None: not there."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a layer of a checkpoint; {} stands for the number of the expert."""

    router: str
    gate: str
    up: str
    down: str


PRE_NORMS = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _all_sliding(_: Mapping[str, object], layers: int) -> list[str]:
    return [SLIDING] * layers


def _sliding_from_max_window_layers(settings: Mapping[str, object], layers: int) -> list[str]:
    # null and 0 differ here: with 0 every layer has the window.
    first = count(settings, "max_window_layers")
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _full_every(default: int) -> LayerTypes:
    """Every so many layers one is full; old configs name the number as `sliding_window_pattern`."""

    def types(settings: Mapping[str, object], layers: int) -> list[str]:
        every = integer(settings, "sliding_window_pattern", default)
        return [FULL if (index + 1) % every == 0 else SLIDING for index in range(layers)]

    return types


def _sliding_without_rope(settings: Mapping[str, object], layers: int) -> list[str]:
    return [FULL if rotated else SLIDING for rotated in rotated_layers(settings, layers)]


def rotated_layers(settings: Mapping[str, object], layers: int) -> list[bool]:
    """Which layers turn queries and keys by their positions: all, or as `no_rope_layers` says.

    Despite its name, a 1 there stands for a layer that does. Left out, every `no_rope_layer_interval`-th does
    not. Raises ModelError.
    """
    interval = settings.get("no_rope_layer_interval")
    listed = settings.get("no_rope_layers")
    if listed is None:
        if interval is None:
            return [True] * layers
        every = integer(settings, "no_rope_layer_interval")
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(one not in (0, 1) for one in listed):
        raise ModelError(f"no_rope_layers: must be {layers} zeros and ones, got {listed!r}")
    return [bool(one) for one in listed[:layers]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family's config does not spell out.

    Attributes:
        defaults: What the library assumes of settings that are left out, where it is not what our reader
            assumes of all families. A setting that is null is not left out.
        reads: Settings that count in this family beside those that do in all.
        ignores: Settings that its configs have and its code does not read.
        qkv_bias: The q, k and v projections have a bias; None: as `attention_bias` says.
        output_bias: The output projection of attention has a bias; None: as `attention_bias` says.
        mlp_bias: The projections of the MLP have a bias; None: as `mlp_bias` says.
        qk_norm: Queries and keys are RMS-normalised before the rotation: each head, or the row of all heads.
        norms: Where rows are normalised.
        wide_norms: The weight of a norm multiplies before the result is rounded to the model's dtype.
        norm_offset: Added to the weights of norms.
        layer_types: Which layers have the sliding window.
        windows_opt_in: `sliding_window` counts only beside a `use_sliding_window` that is true.
        rope_by_type: The rotary embedding has parameters for each type of layer.
        scales_embeddings: Embeddings are multiplied by the root of their width.
        activation: The setting that names the activation of the MLP.
        attention_names: Its projections in a layer of a checkpoint, side by side: q, k and v, or one of all.
        mlp_names: Those of the MLP: gate and up, or one of both.
        experts: Where some layers have experts, and their names.
        wide_routing: The weights of experts stay float32.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: Literal["none", "head", "row"] = "none"
    norms: NormNames = PRE_NORMS
    wide_norms: bool = False
    norm_offset: float = 0.0
    layer_types: LayerTypes = _all_sliding
    windows_opt_in: bool = False
    rope_by_type: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"
    attention_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj")
    experts: ExpertNames | None = None
    wide_routing: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WINDOW = _names("sliding_window")
_QWEN_WINDOWS = _names("sliding_window use_sliding_window max_window_layers layer_types")
_QWEN_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
}
_GEMMA_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_READS = _names("sliding_window layer_types query_pre_attn_scalar final_logit_softcapping")
_EXPERTS_IGNORED = _names("output_router_logits router_aux_loss_coef router_jitter_noise")
_QWEN_EXPERTS = ExpertNames(
    "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"
)
_MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        reads=_WINDOW,
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        reads=_WINDOW | {"num_experts_per_tok", "num_local_experts"},
        ignores=_EXPERTS_IGNORED,
        experts=_MIXTRAL_EXPERTS,
        wide_routing=True,
    ),
    "qwen2": Family(
        defaults=_QWEN_DEFAULTS,
        reads=_QWEN_WINDOWS,
        qkv_bias=True,
        layer_types=_sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3": Family(
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        reads=_QWEN_WINDOWS,
        qkv_bias=None,
        output_bias=None,
        qk_norm="head",
        layer_types=_sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3_moe": Family(
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        reads=_names(
            "sliding_window use_sliding_window num_experts num_local_experts num_experts_per_tok"
            " moe_intermediate_size decoder_sparse_step norm_topk_prob mlp_only_layers"
        ),
        ignores=_EXPERTS_IGNORED | {"max_window_layers"},
        qkv_bias=None,
        output_bias=None,
        qk_norm="head",
        windows_opt_in=True,
        experts=_QWEN_EXPERTS,
    ),
    "gemma": Family(
        defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_pytorch_tanh"},
        ignores=_names("hidden_activation"),
        qkv_bias=None,
        output_bias=None,
        wide_norms=True,
        norm_offset=1.0,
        scales_embeddings=True,
    ),
    "gemma2": Family(
        defaults=_GEMMA_DEFAULTS
        | {"num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_GEMMA_READS | {"attn_logit_softcapping"},
        ignores=_names("hidden_act cache_implementation"),
        qkv_bias=None,
        output_bias=None,
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=_full_every(2),
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 4, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reads=_GEMMA_READS | {"sliding_window_pattern", "rope_local_base_freq"},
        ignores=_names("hidden_act cache_implementation attn_logit_softcapping _sliding_window_pattern"),
        qkv_bias=None,
        output_bias=None,
        qk_norm="head",
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=_full_every(6),
        rope_by_type=True,
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "phi3": Family(
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        reads=_WINDOW | {"original_max_position_embeddings", "partial_rotary_factor"},
        ignores=_names("resid_pdrop embd_pdrop"),
        attention_names=("qkv_proj",),
        mlp_names=("gate_up_proj",),
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        reads=_names("sliding_window use_sliding_window layer_types no_rope_layers no_rope_layer_interval"),
        ignores=_names("max_window_layers"),
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
        layer_types=_sliding_without_rope,
        windows_opt_in=True,
    ),
    "olmo2": Family(
        defaults={"rms_norm_eps": 1e-5},
        qkv_bias=None,
        output_bias=None,
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
    ),
    "olmo3": Family(
        # In the old spelling the library takes `rope_theta` for the full layers alone.
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
        },
        reads=_names("sliding_window layer_types"),
        qkv_bias=None,
        output_bias=None,
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
        layer_types=_full_every(4),
        rope_by_type=True,
    ),
    "granite": Family(
        reads=_names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier"),
        defaults={
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
    ),
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of text and more, of which the text part is served.

    Attributes:
        text: The setting that holds the config of the text part.
        renamed: What names in its checkpoints begin with, and what those of the text part do instead; the
            first that fits counts.
        left_out: What the names of the other parts begin with.
    """

    text: str
    renamed: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        text="text_config",
        renamed=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        left_out=(
            "model.vision_tower.",
            "vision_tower.",
            "model.multi_modal_projector.",
            "multi_modal_projector.",
        ),
    ),
}


def family_of(model_type: object) -> Family:
    """The family of a config.

    Raises:
        UnsupportedError: It is not one of the known ones, which the message lists.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"model_type: must be one of {known}, got {model_type!r}")
    return FAMILIES[model_type]
