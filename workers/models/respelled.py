"""Converts settings that some families spell differently to the spelling that all families share."""

from __future__ import annotations

from collections.abc import Mapping

from workers.models.errors import ModelError
from workers.models.family import CONV, EXPERTS, FULL, LINEAR, MLP, SLIDING, LayerTypes
from workers.models.values import boolean, integer, non_negative_integer, number


def sliding_from_max_window_layers(settings: Mapping[str, object], layers: int) -> list[str]:
    """The types of layers of Qwen2 and Qwen3."""
    # 0 means that every layer has the window, so null is not the same and is refused.
    first = non_negative_integer(settings, "max_window_layers")
    return [SLIDING if index >= first else FULL for index in range(layers)]


def full_every(default: int) -> LayerTypes:
    """Every n-th layer is full; n is `sliding_window_pattern` in old configs, else `default`."""

    def types(settings: Mapping[str, object], layers: int) -> list[str]:
        every = integer(settings, "sliding_window_pattern", default)
        return [FULL if (index + 1) % every == 0 else SLIDING for index in range(layers)]

    return types


def every_other_below_max_window_layers(settings: Mapping[str, object], layers: int) -> list[str]:
    """The types of layers of Qwen2-MoE."""
    below = non_negative_integer(settings, "max_window_layers")
    return [SLIDING if index % 2 == 0 and index < below else FULL for index in range(layers)]


def sliding_without_rope(settings: Mapping[str, object], layers: int) -> list[str]:
    """The types of layers of SmolLM3."""
    # It only matters here: layers listed as sliding have the window anyway.
    if not boolean(settings, "use_sliding_window", default=False):
        return [FULL] * layers
    return [FULL if rotated else SLIDING for rotated in rope_layers(settings, layers)]


def rope_layers(settings: Mapping[str, object], layers: int) -> list[bool]:
    """Whether each layer has a rotary embedding: all, or those with a 1 in `no_rope_layers` despite its name.

    If that is absent, every `no_rope_layer_interval`-th layer has none. Raises ModelError.
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


def lfm2_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Lfm2Config` and `Lfm2MLP` of the library read them."""
    layers = integer(settings, "num_hidden_layers")
    width = integer(settings, "intermediate_size" if settings.get("block_ff_dim") is None else "block_ff_dim")
    if boolean(settings, "block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        if settings.get("block_ffn_dim_multiplier") is not None:
            of = integer(settings, "block_multiple_of")
            width = -(-int(number(settings, "block_ffn_dim_multiplier") * width) // of) * of
    found = dict(settings) | {"intermediate_size": width, "rms_norm_eps": settings["norm_eps"]}
    if settings.get("tie_embedding") is not None:
        found["tie_word_embeddings"] = settings["tie_embedding"]
    if settings.get("layer_types") is None:
        full = settings.get("full_attn_idxs")
        full = range(layers) if full is None else full
        if not isinstance(full, range | list):
            raise ModelError(f"full_attn_idxs: must be a list of layer numbers, got {full!r}")
        found["layer_types"] = [FULL if index in full else CONV for index in range(layers)]
    return found


def lfm2_moe_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Lfm2MoeConfig` of the library reads them."""
    tied = settings.get("tie_embedding")
    return {
        **settings,
        "rms_norm_eps": settings["norm_eps"],
        "tie_word_embeddings": settings["tie_word_embeddings"] if tied is None else tied,
        "mlp_only_layers": [*range(non_negative_integer(settings, "num_dense_layers"))],
    }


def qwen2_moe_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Qwen2MoeAttention` and `Qwen2MoeConfig` of the library read them."""
    return dict(settings) | {"attention_bias": boolean(settings, "qkv_bias", default=True)}


def delta_rule_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Qwen3NextConfig` and `Qwen3_5TextConfig` of the library read them."""
    if settings.get("layer_types") is not None:
        return settings
    every = integer(settings, "full_attention_interval", 4)
    layers = range(integer(settings, "num_hidden_layers"))
    types = [FULL if (index + 1) % every == 0 else LINEAR for index in layers]
    return {**settings, "layer_types": types}


def without_dense_layers(settings: Mapping[str, object]) -> Mapping[str, object]:
    """The same for `Qwen3_5MoeTextConfig`, which has no width of an MLP."""
    return {**delta_rule_settings(settings), "intermediate_size": settings["moe_intermediate_size"]}


def granite_moe_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `GraniteMoeSharedConfig` of the library reads them."""
    return {**settings, "shared_expert_intermediate_size": settings.get("shared_intermediate_size", 0)}


def latent_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `DeepseekV3Config`, `DeepseekV2Config` and `Glm4MoeLiteConfig` of the library read them."""
    layers, size = integer(settings, "num_hidden_layers"), integer(settings, "moe_intermediate_size")
    if (types := settings.get("mlp_layer_types")) is not None:
        if not isinstance(types, list) or len(types) != layers or {*types} - {"dense", "sparse"}:
            raise ModelError(f"mlp_layer_types: must be dense or sparse for {layers} layers, got {types!r}")
        dense = [index for index, kind in enumerate(types) if kind == "dense"]
    else:
        dense = [*range(min(layers, non_negative_integer(settings, "first_k_dense_replace")))]
    experts = next(
        (
            settings[name]
            for name in ("n_routed_experts", "num_local_experts", "num_experts")
            if settings.get(name)
        ),
        None,
    )
    return dict(settings) | {
        "num_experts": experts,
        "num_local_experts": None,
        "shared_expert_intermediate_size": size * integer(settings, "n_shared_experts"),
        "mlp_only_layers": dense,
        # A token's data in pages.
        "num_key_value_heads": 1,
        "head_dim": integer(settings, "kv_lora_rank") + integer(settings, "qk_rope_head_dim"),
    }


# Other names of settings in the configs of Kimi Linear.
_KIMI_NAMES = (
    ("model_max_length", "max_position_embeddings"),
    ("moe_renormalize", "norm_topk_prob"),
    ("num_expert_group", "n_group"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_shared_experts", "n_shared_experts"),
)
# Names in `linear_attn_config` of published configs.
_KIMI_LINEAR_NAMES = (
    ("head_dim", "linear_head_dim"),
    ("num_heads", "linear_num_heads"),
    ("short_conv_kernel_size", "linear_conv_kernel_dim"),
)


def kimi_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `KimiLinearConfig` of the library reads them. No layer has a rotation."""
    layers, linear = range(integer(settings, "num_hidden_layers")), settings.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ModelError(f"linear_attn_config: must be an object, got {linear!r}")
    found = dict(settings)
    found |= {ours: settings[theirs] for theirs, ours in _KIMI_NAMES if settings.get(theirs) is not None}
    found |= {ours: linear[theirs] for theirs, ours in _KIMI_LINEAR_NAMES if theirs in linear}
    if settings.get("layer_types") is None:
        full = linear.get("full_attn_layers")  # counted from 1
        full = full if isinstance(full, list) else [index + 1 for index in layers if index and index % 4 == 0]
        found["layer_types"] = [FULL if index + 1 in full else LINEAR for index in layers]
    return latent_settings(found | {"no_rope_layers": [0] * len(layers)})


# Types of layers in configs of Granite 4; see `layer_types` in the library's configuration_utils.py.
_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}


def granite_hybrid_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `GraniteMoeHybridConfig` of the library reads them."""
    layers = integer(settings, "num_hidden_layers")
    listed = settings.get("layer_types") or settings.get("layers_block_type")
    if listed is None:
        listed = [LINEAR] * layers
    if isinstance(listed, list):
        listed = [_OLD_TYPES.get(str(one), one) for one in listed]
    found = {**granite_moe_settings(settings), "layer_types": listed}
    if not settings["num_local_experts"]:
        found["intermediate_size"] = settings["shared_intermediate_size"]
    if settings.get("position_embedding_type") != "rope":
        found["no_rope_layers"] = [0] * layers
    return found


def bamba_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `BambaConfig` of the library reads them, which has a fixed share of rotated elements."""
    full = settings.get("attn_layer_indices") or []
    if not isinstance(full, list):
        raise ModelError(f"attn_layer_indices: must be a list of layer numbers, got {full!r}")
    layers = range(integer(settings, "num_hidden_layers"))
    types = [FULL if index in full else LINEAR for index in layers]
    return {**settings, "layer_types": types, "partial_rotary_factor": 0.5}


def jamba_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `JambaConfig` of the library reads them."""
    layers = range(integer(settings, "num_hidden_layers"))
    full, sparse = (
        (integer(settings, f"{name}_layer_period"), non_negative_integer(settings, f"{name}_layer_offset"))
        for name in ("attn", "expert")
    )
    has_experts = integer(settings, "num_experts") > 1
    return {
        **settings,
        "layer_types": [FULL if index % full[0] == full[1] else LINEAR for index in layers],
        "mlp_only_layers": [i for i in layers if not has_experts or i % sparse[0] != sparse[1]],
        "no_rope_layers": [0] * len(layers),
        "norm_topk_prob": False,
    }


# Names of settings in the configs of Mamba, and their names in hybrids.
_MAMBA_NAMES = (
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("expand", "mamba_expand"),
    ("state_size", "mamba_d_state"),
    ("conv_kernel", "mamba_d_conv"),
    ("use_conv_bias", "mamba_conv_bias"),
    ("use_bias", "mamba_proj_bias"),
    ("time_step_rank", "mamba_dt_rank"),
    ("num_heads", "mamba_n_heads"),
    ("head_dim", "mamba_d_head"),
    ("n_groups", "mamba_n_groups"),
)


def mamba_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `MambaConfig` and `FalconMambaConfig` of the library read them."""
    inner = integer(settings, "expand") * integer(settings, "hidden_size")
    spelled = {ours: settings[theirs] for theirs, ours in _MAMBA_NAMES if theirs in settings}
    return {
        **settings,
        **spelled,
        "layer_types": [LINEAR] * integer(settings, "num_hidden_layers"),
        "intermediate_size": integer(settings, "intermediate_size", inner),
        # Settings of attention, which no layer has.
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }


def mamba2_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Mamba2Config` of the library reads them, which supports no other inner width."""
    return mamba_settings({**settings, "intermediate_size": None})


def falcon_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `FalconH1ForCausalLM` of the library reads them."""
    return {**settings, "logits_scaling": 1.0 / number(settings, "lm_head_multiplier", 1.0)}


# Letters of `hybrid_override_pattern`.
_NEMOTRON_TYPES = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
# Old names of settings, which the library prefers, and names that other families have.
_NEMOTRON_NAMES = (
    ("mamba_n_groups", "n_groups", "mamba_n_groups"),
    ("mamba_d_conv", "conv_kernel", "mamba_d_conv"),
    ("mamba_conv_bias", "use_conv_bias", "mamba_conv_bias"),
    ("mamba_dt_min", "time_step_min", "time_step_min"),
    ("", "use_bias", "mamba_proj_bias"),
    ("", "mamba_num_heads", "mamba_n_heads"),
    ("", "mamba_head_dim", "mamba_d_head"),
    ("", "ssm_state_size", "mamba_d_state"),
    ("", "mamba_hidden_act", "hidden_act"),
    ("", "layer_norm_epsilon", "rms_norm_eps"),
)


def nemotron_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `NemotronHConfig` of the library reads them. No layer has the sliding window."""
    listed = settings.get("layers_block_type") or settings.get("layer_types")
    pattern = settings.get("hybrid_override_pattern")
    if listed is None:
        listed = [_NEMOTRON_TYPES.get(one, one) for one in pattern] if isinstance(pattern, str) else [EXPERTS]
    if not isinstance(listed, list):
        raise ModelError(f"layers_block_type: must be a list of types of layers, got {listed!r}")
    spelled = {name: settings.get(old, settings[new]) for old, new, name in _NEMOTRON_NAMES}
    inner = integer(spelled, "mamba_n_heads") * integer(spelled, "mamba_d_head")
    return {
        **settings,
        **spelled,
        "mamba_expand": 1,
        "mamba_d_ssm": inner,
        "layer_types": [_OLD_TYPES.get(str(one), one) for one in listed],
        "num_experts": settings.get("num_local_experts", settings["n_routed_experts"]),
        "num_local_experts": None,
        "shared_expert_intermediate_size": settings["moe_shared_expert_intermediate_size"],
        "mlp_only_layers": [index for index, kind in enumerate(listed) if kind != EXPERTS],
        "num_hidden_layers": len(listed),
        "no_rope_layers": [0] * len(listed),
    }
