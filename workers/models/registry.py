"""The model families that have native code, by the `model_type` of their config.

A family has what its config.json does not say: the library's defaults, and its differences in structure. To
add a family with a supported structure, add an entry.

Sources: the configuration_*.py and modeling_*.py of transformers 5.23. `tests/workers/test_families.py`
compares the defaults with them, and the logits.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.errors import UnsupportedError
from workers.models.family import POST_NORMS, SANDWICH_NORMS, ExpertNames, Family, NormNames
from workers.models.respelled import (
    bamba_settings,
    delta_rule_settings,
    every_other_below_max_window_layers,
    falcon_settings,
    full_every,
    granite_hybrid_settings,
    granite_moe_settings,
    jamba_settings,
    kimi_settings,
    latent_settings,
    lfm2_moe_settings,
    lfm2_settings,
    nemotron_settings,
    qwen2_moe_settings,
    sliding_from_max_window_layers,
    sliding_without_rope,
    without_dense_layers,
)
from workers.models.values import names


def _defaults(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    max_position_embeddings: int,
    bos_token_id: int | None,
    eos_token_id: int | None,
    **more: object,
) -> dict[str, object]:
    """The defaults of a family."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        **more,
    }


_WINDOW = names("sliding_window")
_QWEN_WINDOWS = names("sliding_window use_sliding_window max_window_layers layer_types")
_LLAMA_DEFAULTS = _defaults(32000, 4096, 11008, 32, 32, 2048, 1, 2)
_MISTRAL_DEFAULTS = _defaults(32000, 4096, 14336, 32, 32, 131072, 1, 2, num_key_value_heads=8)
_QWEN_DEFAULTS = _defaults(
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
_OLMO_DEFAULTS = _defaults(50304, 4096, 11008, 32, 32, 2048, None, 50279, rms_norm_eps=1e-5)
_GRANITE_READS = names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier")
_GEMMA_READS = names("sliding_window layer_types query_pre_attn_scalar final_logit_softcapping")
_QWEN_EXPERTS = ExpertNames(
    "mlp.gate",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
    stacked="mlp.experts.",
)
_QWEN_SHARED_EXPERTS = replace(
    _QWEN_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
)
_QWEN_EXPERTS_READS = names(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step"
    " norm_topk_prob mlp_only_layers"
)
_MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)

_GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.experts.{}.gate_proj",
    "block_sparse_moe.experts.{}.up_proj",
    "block_sparse_moe.experts.{}.down_proj",
    stacked="block_sparse_moe.",
    stacked_parts=("input_linear.weight", "output_linear.weight"),
    module="block_sparse_moe.experts",
    shared="shared_mlp",
)

_GPT_OSS_EXPERTS = ExpertNames(
    "mlp.router",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
    stacked="mlp.experts.",
    by_turns=True,
)

_MAMBA2_READS = names(
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias"
    " mamba_proj_bias time_step_limit"
)
_MAMBA2_DEFAULTS: dict[str, object] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "hidden_act": "silu",
}
_DELTA_RULE_READS = names(
    "layer_types full_attention_interval partial_rotary_factor linear_conv_kernel_dim linear_key_head_dim"
    " linear_value_head_dim linear_num_key_heads linear_num_value_heads gguf_layout"
)
_DELTA_RULE_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_DEEPSEEK_EXPERTS = replace(_QWEN_EXPERTS, shared="mlp.shared_experts")
_LATENT_READS = names(
    "attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts"
    " num_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size"
    " first_k_dense_replace norm_topk_prob routed_scaling_factor n_group topk_group"
)
_KIMI_FORGET = ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")
_DEEPSEEK_V3 = Family(
    defaults=_defaults(
        *(129280, 7168, 18432, 61, 128, 4096, 0, 1),
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
    ),
    reads=_LATENT_READS | {"rope_interleave"},
    respelled=latent_settings,
    experts=_DEEPSEEK_EXPERTS,
    wide_routing=True,
    wide_router=True,
    sigmoid_routing=True,
    routing_eps=1e-20,
    left_out=("model.layers.{}.", "mtp."),
    mtp_names=(("model.layers.{}.", "model.layers.{}."),),
    mtp_feeds_normed=False,
)

_MISTRAL = Family(
    defaults=_MISTRAL_DEFAULTS | {"sliding_window": 4096},
    reads=_WINDOW | {"layer_types"},
    qkv_bias=False,
    output_bias=False,
)

_QWEN_3_5 = Family(
    defaults=_defaults(
        *(248320, 4096, 12288, 32, 16, 32768, None, None),
        num_key_value_heads=4,
    )
    | _DELTA_RULE_DEFAULTS,
    reads=_DELTA_RULE_READS,
    qk_norm="head",
    wide_norms=True,
    norm_offset=1.0,
    respelled=delta_rule_settings,
    recurrent="gated_delta",
    recurrent_place="linear_attn",
    recurrent_names=("in_proj_z", "in_proj_qkv", "in_proj_b", "in_proj_a"),
    gguf_tiled=True,
    left_out=("mtp.",),
    mtp_names=(
        ("mtp.layers.0.", "model.layers.{}."),
        ("mtp.fc.", "model.layers.{}.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.layers.{}.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.layers.{}.hnorm."),
        ("mtp.norm.", "model.layers.{}.shared_head.norm."),
    ),
    gated_attention=True,
)

_GRANITE_MOE = Family(
    defaults=_LLAMA_DEFAULTS
    | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"},
    reads=_GRANITE_READS | names("num_local_experts num_experts_per_tok"),
    respelled=granite_moe_settings,
    mlp="shared_mlp",
    mlp_names=("input_linear",),
    mlp_down="output_linear",
    experts=_GRANITE_EXPERTS,
)
_GRANITE_MOE_SHARED = replace(
    _GRANITE_MOE,
    defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    reads=_GRANITE_MOE.reads | names("shared_intermediate_size gguf_layout"),
    gguf_mlp_names=("gate_linear", "up_linear"),
)

_LFM2_READS = names("layer_types norm_eps tie_embedding conv_bias conv_L_cache")
_LFM2 = Family(
    defaults=_defaults(
        *(65536, 2560, 12288, 32, 32, 128_000, 1, 2),
        num_key_value_heads=8,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        conv_bias=False,
        conv_L_cache=3,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
    ),
    reads=_LFM2_READS
    | names(
        "full_attn_idxs block_ff_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim"
    ),
    qkv_bias=False,
    output_bias=False,
    qk_norm="head",
    norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
    respelled=lfm2_settings,
    recurrent="short_conv",
    recurrent_place="conv",
    final_norm="embedding_norm",
    qk_norm_names=("q_layernorm", "k_layernorm"),
    attention_output="out_proj",
    mlp="feed_forward",
    mlp_names=("w1", "w3"),
    mlp_down="w2",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults=_LLAMA_DEFAULTS, mlp_bias=None),
    "mistral": _MISTRAL,
    # What the library makes of a mistral whose config lists the types of its layers.
    "ministral": _MISTRAL,
    "mixtral": Family(
        defaults=_MISTRAL_DEFAULTS
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        reads=_WINDOW | {"num_experts_per_tok", "num_local_experts"},
        qkv_bias=False,
        output_bias=False,
        experts=_MIXTRAL_EXPERTS,
        wide_routing=True,
    ),
    "qwen2": Family(
        defaults=_QWEN_DEFAULTS,
        reads=_QWEN_WINDOWS,
        qkv_bias=True,
        output_bias=False,
        layer_types=sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3": Family(
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        reads=_QWEN_WINDOWS,
        qk_norm="head",
        layer_types=sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3_moe": Family(
        defaults=_defaults(
            *(151936, 2048, 6144, 24, 32, 32768, None, None),
            num_key_value_heads=4,
            sliding_window=4096,
            num_experts_per_tok=8,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        reads=_QWEN_EXPERTS_READS | names("sliding_window use_sliding_window"),
        qk_norm="head",
        windows_opt_in=True,
        experts=_QWEN_EXPERTS,
    ),
    "gemma": Family(
        defaults=_defaults(
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
        defaults=_defaults(256000, 2304, 9216, 26, 8, 8192, 2, 1, **_GEMMA_DEFAULTS)
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
        defaults=_defaults(262208, 2304, 9216, 26, 8, 131072, 2, 1, **_GEMMA_DEFAULTS)
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
        defaults=_defaults(32064, 3072, 8192, 32, 32, 4096, 1, 32000)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        reads=_WINDOW | {"partial_rotary_factor"},
        qkv_bias=False,
        output_bias=False,
        attention_names=("qkv_proj",),
        mlp_names=("gate_up_proj",),
    ),
    "smollm3": Family(
        defaults=_defaults(
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
    "olmo2": Family(
        defaults=_OLMO_DEFAULTS,
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
    ),
    "olmo3": Family(
        # In the old spelling the library uses `rope_theta` for the full layers only.
        defaults=_OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        reads=names("sliding_window layer_types rope_local_base_freq"),
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
        layer_types=full_every(4),
        rope_by_type=True,
    ),
    "gpt_oss": Family(
        defaults=_defaults(
            *(201088, 2880, 2880, 36, 64, 131072, None, None),
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            sliding_window=128,
            attention_bias=True,
            num_local_experts=128,
            num_experts_per_tok=4,
            rope_theta=150_000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        reads=_WINDOW
        | names("layer_types num_local_experts num_experts num_experts_per_tok swiglu_alpha swiglu_limit"),
        wide_norms=True,
        layer_types=full_every(2),
        experts=_GPT_OSS_EXPERTS,
        expert_biases=True,
        clamped_gate=True,
        sinks=True,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        defaults=_defaults(
            *(65536, 2048, 7168, 32, 32, 128_000, 1, 2),
            num_key_value_heads=8,
            norm_eps=1e-5,
            tie_word_embeddings=True,
            conv_bias=False,
            conv_L_cache=3,
            rope_theta=1e6,
            num_experts=32,
            num_experts_per_tok=4,
            num_dense_layers=2,
            moe_intermediate_size=1792,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        reads=_LFM2_READS
        | names(
            "num_experts num_local_experts num_experts_per_tok num_dense_layers moe_intermediate_size"
            " norm_topk_prob routed_scaling_factor use_expert_bias"
        ),
        respelled=lfm2_moe_settings,
        experts=ExpertNames(
            "feed_forward.gate",
            "feed_forward.experts.{}.w1",
            "feed_forward.experts.{}.w3",
            "feed_forward.experts.{}.w2",
            correction="feed_forward.expert_bias",
            stacked="feed_forward.experts.",
        ),
        sigmoid_routing=True,
        routing_eps=1e-6,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE_SHARED,
    "granitemoehybrid": replace(
        _GRANITE_MOE_SHARED,
        defaults={**_GRANITE_MOE.defaults, **_MAMBA2_DEFAULTS, "shared_intermediate_size": 1024},
        reads=_GRANITE_MOE_SHARED.reads
        | _MAMBA2_READS
        | names("layer_types layers_block_type position_embedding_type"),
        respelled=granite_hybrid_settings,
        recurrent="mamba2",
    ),
    "bamba": Family(
        defaults=_defaults(
            *(128000, 4096, 14336, 32, 32, 262144, 1, 2), num_key_value_heads=8, rms_norm_eps=1e-5
        )
        | _MAMBA2_DEFAULTS,
        reads=_MAMBA2_READS | names("attn_layer_indices layer_types partial_rotary_factor"),
        mlp_bias=None,
        norms=NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
        respelled=bamba_settings,
        recurrent="mamba2",
        final_norm="final_layernorm",
        mlp="feed_forward",
    ),
    "falcon_h1": Family(
        defaults=_defaults(
            *(128000, 4096, 14336, 32, 32, 8192, 1, 2), num_key_value_heads=8, rms_norm_eps=1e-5
        )
        | _MAMBA2_DEFAULTS
        | {
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
        },
        reads=_MAMBA2_READS
        | names(
            "mamba_d_ssm mamba_rms_norm mamba_norm_before_gate projectors_bias lm_head_multiplier"
            " embedding_multiplier mlp_multipliers key_multiplier attention_out_multiplier"
            " attention_in_multiplier ssm_multipliers ssm_in_multiplier ssm_out_multiplier"
        ),
        mlp_bias=None,
        norms=NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
        respelled=falcon_settings,
        recurrent="mamba2",
        side_by_side=True,
        final_norm="final_layernorm",
        mlp="feed_forward",
    ),
    "jamba": Family(
        defaults=_defaults(
            *(65536, 4096, 14336, 32, 32, 262144, 1, 2),
            num_key_value_heads=8,
            hidden_act="silu",
            num_experts_per_tok=2,
            num_experts=16,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank="auto",
            mamba_conv_bias=True,
        ),
        reads=names(
            "num_experts num_local_experts num_experts_per_tok expert_layer_period expert_layer_offset"
            " attn_layer_period attn_layer_offset mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank"
            " mamba_conv_bias mamba_proj_bias layer_types"
        ),
        qkv_bias=False,
        output_bias=False,
        norms=NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
        respelled=jamba_settings,
        recurrent="mamba1",
        final_norm="final_layernorm",
        mlp="feed_forward",
        experts=ExpertNames(
            "feed_forward.router",
            "feed_forward.experts.{}.gate_proj",
            "feed_forward.experts.{}.up_proj",
            "feed_forward.experts.{}.down_proj",
            stacked="feed_forward.experts.",
        ),
    ),
    "nemotron_h": Family(
        defaults=_defaults(
            *(131072, 4096, 21504, 1, 32, 4096, 1, 2),
            num_key_value_heads=8,
            head_dim=128,
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            mamba_num_heads=128,
            mamba_head_dim=64,
            mamba_hidden_act="silu",
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
            use_conv_bias=True,
            use_bias=False,
            time_step_min=0.001,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        reads=names(
            "layer_types layers_block_type hybrid_override_pattern layer_norm_epsilon mamba_num_heads"
            " mamba_head_dim mamba_hidden_act ssm_state_size n_groups conv_kernel use_conv_bias use_bias"
            " time_step_min mamba_n_groups mamba_d_conv mamba_conv_bias mamba_dt_min sliding_window"
            " n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size"
            " moe_latent_size norm_topk_prob routed_scaling_factor n_group topk_group"
        ),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=None,
        norms=NormNames(before_attention="norm", before_mlp="norm"),
        wide_norms=True,
        activation="mlp_hidden_act",
        respelled=nemotron_settings,
        recurrent="mamba2",
        recurrent_place="mixer",
        final_norm="norm_f",
        attention="mixer",
        mlp="mixer",
        mlp_names=("up_proj",),
        gated_mlp=False,
        experts=ExpertNames(
            "mixer.gate",
            "",
            "mixer.experts.{}.up_proj",
            "mixer.experts.{}.down_proj",
            correction="mixer.gate.e_score_correction_bias",
            shared="mixer.shared_experts",
            latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        ),
        wide_routing=True,
        wide_router=True,
        sigmoid_routing=True,
        routing_eps=1e-20,
        one_sublayer=True,
        renamed=(
            ("backbone.embeddings.", "model.embed_tokens."),
            ("model.embeddings.", "model.embed_tokens."),
            ("backbone.", "model."),
        ),
        left_out=("mtp.",),  # for the prediction of several tokens
    ),
    "arcee": Family(
        defaults=_defaults(*(32000, 2560, 18432, 32, 32, 4096, 128000, 128001), rms_norm_eps=1e-5)
        | {"hidden_act": "relu2"},
        mlp_bias=None,
        mlp_names=("up_proj",),
        gated_mlp=False,
    ),
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": replace(
        _QWEN_3_5,
        defaults=_defaults(
            *(248320, 2048, 5632, 40, 16, 32768, None, None),
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        )
        | _DELTA_RULE_DEFAULTS,
        respelled=without_dense_layers,
        reads=_DELTA_RULE_READS
        | names(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
            " shared_expert_intermediate_size"
        ),
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "qwen3_next": replace(
        _QWEN_3_5,
        defaults=_defaults(
            *(151936, 2048, 5632, 48, 16, 32768, None, None),
            num_key_value_heads=2,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        )
        | _DELTA_RULE_DEFAULTS,
        reads=_DELTA_RULE_READS | _QWEN_EXPERTS_READS | {"shared_expert_intermediate_size"},
        recurrent_names=("in_proj_qkvz", "in_proj_ba"),
        gguf_recurrent_names=("in_proj_z", "in_proj_qkv", "in_proj_ba"),
        gguf_tiled=False,
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "qwen2_moe": Family(
        defaults=_defaults(
            *(151936, 2048, 5632, 24, 16, 32768, None, None),
            num_key_value_heads=16,
            sliding_window=4096,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            max_window_layers=28,
            shared_expert_intermediate_size=5632,
            qkv_bias=True,
        ),
        reads=_QWEN_EXPERTS_READS | _QWEN_WINDOWS | names("qkv_bias shared_expert_intermediate_size"),
        layer_types=every_other_below_max_window_layers,
        respelled=qwen2_moe_settings,
        output_bias=False,
        windows_opt_in=True,
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        defaults=_defaults(
            *(154880, 2048, 10240, 47, 20, 202752, 0, 1),
            rms_norm_eps=1e-5,
            kv_lora_rank=512,
            q_lora_rank=768,
            qk_rope_head_dim=64,
            qk_nope_head_dim=192,
            v_head_dim=256,
            n_routed_experts=64,
            num_experts_per_tok=4,
            n_shared_experts=1,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.8,
            n_group=1,
            topk_group=1,
        ),
        reads=_LATENT_READS - {"first_k_dense_replace"} | {"rope_interleave", "mlp_layer_types"},
    ),
    "kimi_linear": replace(
        _DEEPSEEK_V3,
        defaults=_defaults(
            *(163840, 2304, 9216, 27, 32, 1048576, 163584, 163586),
            rms_norm_eps=1e-5,
            hidden_act="silu",
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            num_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=1024,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.446,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
        ),
        reads=_LATENT_READS
        | names(
            "mlp_layer_types layer_types linear_attn_config linear_head_dim linear_num_heads"
            " linear_conv_kernel_dim model_max_length moe_renormalize num_expert_group num_experts_per_token"
            " num_shared_experts"
        ),
        respelled=kimi_settings,
        recurrent="kimi_delta",
        recurrent_place="self_attn",
        experts=replace(
            _DEEPSEEK_EXPERTS,
            gate="mlp.experts.{}.w1",
            up="mlp.experts.{}.w3",
            down="mlp.experts.{}.w2",
        ),
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            *((f".self_attn.{name}", f".self_attn.forget_gate.{name}") for name in _KIMI_FORGET),
        ),
        left_out=(),
        mtp_names=(),
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        defaults=_defaults(
            *(102400, 4096, 11008, 32, 32, 2048, 1, 2),
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
        ),
        reads=_LATENT_READS | {"topk_method", "mlp_bias"},
        mlp_bias=None,
        sigmoid_routing=False,
        left_out=(),
        mtp_names=(),
    ),
    "granite": Family(
        reads=_GRANITE_READS,
        defaults=_LLAMA_DEFAULTS | {"attention_multiplier": 1.0},
        mlp_bias=None,
    ),
}


def family_of(model_type: object) -> Family:
    """The family of a config.

    Raises:
        UnsupportedError: The family is unknown.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(f"model_type: there is no native code for {model_type!r}")
    return FAMILIES[model_type]
