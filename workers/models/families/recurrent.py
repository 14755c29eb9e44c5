"""Families with recurrent layers beside attention. See `workers.models.registry`."""

from __future__ import annotations

from dataclasses import replace

from workers.models.families.mixtures import (
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    QWEN_EXPERTS_READS,
    QWEN_SHARED_EXPERTS,
)
from workers.models.family import ExpertNames, Family, NormNames, defaults
from workers.models.respelled import (
    bamba_settings,
    delta_rule_settings,
    falcon_settings,
    granite_hybrid_settings,
    jamba_settings,
    lfm2_moe_settings,
    lfm2_settings,
    mamba2_settings,
    mamba_settings,
    nemotron_settings,
    without_dense_layers,
)
from workers.models.values import names

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
_QWEN_3_5 = Family(
    defaults=defaults(
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
_BACKBONE = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("model.embeddings.", "model.embed_tokens."),
    ("backbone.", "model."),
)
# Their configs name no maximum length, and they have no positions.
_MAMBA = Family(
    defaults=defaults(
        *(50280, 768, None, 32, None, 1 << 20, 0, 0),
        layer_norm_epsilon=1e-5,
        state_size=16,
        expand=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        hidden_act="silu",
        time_step_rank="auto",
        tie_word_embeddings=True,
    ),
    reads=names(
        "layer_types layer_norm_epsilon state_size expand conv_kernel use_bias use_conv_bias time_step_rank"
    ),
    norms=NormNames(before_attention="norm"),
    respelled=mamba_settings,
    recurrent="mamba1",
    recurrent_place="mixer",
    final_norm="norm_f",
    one_sublayer=True,
    renamed=_BACKBONE,
)
_LFM2_READS = names("layer_types norm_eps tie_embedding conv_bias conv_L_cache")
_LFM2 = Family(
    defaults=defaults(
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

RECURRENT: dict[str, Family] = {
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": replace(
        _QWEN_3_5,
        defaults=defaults(
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
        experts=QWEN_SHARED_EXPERTS,
    ),
    "qwen3_next": replace(
        _QWEN_3_5,
        defaults=defaults(
            *(151936, 2048, 5632, 48, 16, 32768, None, None),
            num_key_value_heads=2,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        )
        | _DELTA_RULE_DEFAULTS,
        reads=_DELTA_RULE_READS | QWEN_EXPERTS_READS | {"shared_expert_intermediate_size"},
        recurrent_names=("in_proj_qkvz", "in_proj_ba"),
        gguf_recurrent_names=("in_proj_z", "in_proj_qkv", "in_proj_ba"),
        gguf_tiled=False,
        experts=QWEN_SHARED_EXPERTS,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        defaults=defaults(
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
    "granitemoehybrid": replace(
        GRANITE_MOE_SHARED,
        defaults={**GRANITE_MOE.defaults, **_MAMBA2_DEFAULTS, "shared_intermediate_size": 1024},
        reads=GRANITE_MOE_SHARED.reads
        | _MAMBA2_READS
        | names("layer_types layers_block_type position_embedding_type"),
        respelled=granite_hybrid_settings,
        recurrent="mamba2",
    ),
    "bamba": Family(
        defaults=defaults(
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
        defaults=defaults(
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
        defaults=defaults(
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
        recurrent="jamba",
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
    "mamba": _MAMBA,
    "falcon_mamba": replace(
        _MAMBA,
        defaults={**_MAMBA.defaults, "mixer_rms_eps": 1e-6},
        reads=_MAMBA.reads | {"mixer_rms_eps"},
        recurrent="falcon_mamba",
    ),
    "mamba2": replace(
        _MAMBA,
        defaults={
            **_MAMBA.defaults,
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "eos_token_id": 2,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "tie_word_embeddings": False,
        },
        reads=_MAMBA.reads | names("num_heads n_groups time_step_limit"),
        respelled=mamba2_settings,
        recurrent="mamba2",
    ),
    "nemotron_h": Family(
        defaults=defaults(
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
            " n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size"
            " moe_shared_expert_intermediate_size"
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
        renamed=_BACKBONE,
        left_out=("mtp.",),  # the MTP head
    ),
}
