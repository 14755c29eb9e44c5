"""Families of attention and a dense MLP. See `workers.models.registry`."""

from __future__ import annotations

from workers.models.family import POST_NORMS, SANDWICH_NORMS, Family, defaults
from workers.models.respelled import full_every, sliding_from_max_window_layers, sliding_without_rope
from workers.models.values import names

WINDOW = names("sliding_window")
QWEN_WINDOWS = names("sliding_window use_sliding_window max_window_layers layer_types")
LLAMA_DEFAULTS = defaults(32000, 4096, 11008, 32, 32, 2048, 1, 2)
MISTRAL_DEFAULTS = defaults(32000, 4096, 14336, 32, 32, 131072, 1, 2, num_key_value_heads=8)
_QWEN_DEFAULTS = defaults(
    *(151936, 4096, 22016, 32, 32, 32768, None, None),
    num_key_value_heads=32,
    sliding_window=4096,
    max_window_layers=28,
)
_GEMMA_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_OLMO_DEFAULTS = defaults(50304, 4096, 11008, 32, 32, 2048, None, 50279, rms_norm_eps=1e-5)
GRANITE_READS = names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier")
_GEMMA_READS = names("sliding_window layer_types query_pre_attn_scalar final_logit_softcapping")
_MISTRAL = Family(
    defaults=MISTRAL_DEFAULTS | {"sliding_window": 4096},
    reads=WINDOW | {"layer_types"},
    qkv_bias=False,
    output_bias=False,
)

DENSE: dict[str, Family] = {
    "llama": Family(defaults=LLAMA_DEFAULTS, mlp_bias=None),
    "mistral": _MISTRAL,
    # The library's type for a mistral whose config lists the types of its layers.
    "ministral": _MISTRAL,
    "qwen2": Family(
        defaults=_QWEN_DEFAULTS,
        reads=QWEN_WINDOWS,
        qkv_bias=True,
        output_bias=False,
        layer_types=sliding_from_max_window_layers,
        windows_opt_in=True,
        left_out=("model.mtp_layers.",),  # MiMo's MTP heads
    ),
    "qwen3": Family(
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        reads=QWEN_WINDOWS,
        qk_norm="head",
        layer_types=sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "gemma": Family(
        defaults=defaults(
            *(256000, 3072, 24576, 28, 16, 8192, 2, 1),
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
            hidden_act="gelu_pytorch_tanh",
        ),
        wide_norms=True,
        norm_offset=1.0,
        scales_embeddings=True,
    ),
    "gemma2": Family(
        defaults=defaults(256000, 2304, 9216, 26, 8, 8192, 2, 1, **_GEMMA_DEFAULTS)
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_GEMMA_READS | {"attn_logit_softcapping"},
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=full_every(2),
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        defaults=defaults(262208, 2304, 9216, 26, 8, 131072, 2, 1, **_GEMMA_DEFAULTS)
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reads=_GEMMA_READS | {"sliding_window_pattern", "rope_local_base_freq"},
        qk_norm="head",
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=full_every(6),
        rope_by_type=True,
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "phi3": Family(
        defaults=defaults(32064, 3072, 8192, 32, 32, 4096, 1, 32000)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        reads=WINDOW | {"partial_rotary_factor"},
        qkv_bias=False,
        output_bias=False,
        attention_names=("qkv_proj",),
        mlp_names=("gate_up_proj",),
    ),
    "smollm3": Family(
        defaults=defaults(
            *(128256, 2048, 11008, 36, 16, 32768, 128000, 128001),
            num_key_value_heads=4,
            rope_theta=2e6,
            tie_word_embeddings=True,
            no_rope_layer_interval=4,
        ),
        reads=names("sliding_window use_sliding_window layer_types no_rope_layers no_rope_layer_interval"),
        mlp_bias=None,
        layer_types=sliding_without_rope,
    ),
    "olmo2": Family(defaults=_OLMO_DEFAULTS, qk_norm="row", norms=POST_NORMS, wide_norms=True),
    "olmo3": Family(
        # In the old spelling the library uses `rope_theta` only for the full layers, and no other key.
        defaults=_OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        reads=names("sliding_window layer_types"),
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
        layer_types=full_every(4),
        rope_by_type=True,
    ),
    "granite": Family(
        reads=GRANITE_READS, defaults=LLAMA_DEFAULTS | {"attention_multiplier": 1.0}, mlp_bias=None
    ),
    "arcee": Family(
        defaults=defaults(*(32000, 2560, 18432, 32, 32, 4096, 128000, 128001), rms_norm_eps=1e-5)
        | {"hidden_act": "relu2"},
        mlp_bias=None,
        mlp_names=("up_proj",),
        gated_mlp=False,
    ),
}
