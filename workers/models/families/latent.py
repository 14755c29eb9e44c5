"""Families with multi-head latent attention. See `workers.models.registry`."""

from __future__ import annotations

from dataclasses import replace

from workers.models.families.mixtures import QWEN_EXPERTS
from workers.models.family import Family, defaults
from workers.models.respelled import kimi_settings, latent_settings
from workers.models.values import names

DEEPSEEK_EXPERTS = replace(QWEN_EXPERTS, shared="mlp.shared_experts")
_LATENT_READS = names(
    "attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts"
    " num_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size"
    " first_k_dense_replace norm_topk_prob routed_scaling_factor n_group topk_group"
)
# The most common widths.
_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_KIMI_FORGET = ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")
_DEEPSEEK_V3 = Family(
    defaults=defaults(
        *(129280, 7168, 18432, 61, 128, 4096, 0, 1),
        **_WIDTHS,
        q_lora_rank=1536,
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
    latent_attention=True,
    respelled=latent_settings,
    experts=DEEPSEEK_EXPERTS,
    wide_routing=True,
    wide_router=True,
    sigmoid_routing=True,
    routing_eps=1e-20,
    left_out=("model.layers.{}.", "mtp."),
    mtp_names=(("model.layers.{}.", "model.layers.{}."),),
    mtp_feeds_normed=False,
)

LATENT: dict[str, Family] = {
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        defaults=defaults(
            *(102400, 4096, 11008, 32, 32, 2048, 1, 2),
            **_WIDTHS,
            q_lora_rank=1536,
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
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        defaults=defaults(
            *(154880, 2048, 10240, 47, 20, 202752, 0, 1),
            rms_norm_eps=1e-5,
            **_WIDTHS | {"qk_nope_head_dim": 192, "v_head_dim": 256},
            q_lora_rank=768,
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
        defaults=defaults(
            *(163840, 2304, 9216, 27, 32, 1048576, 163584, 163586),
            rms_norm_eps=1e-5,
            hidden_act="silu",
            **_WIDTHS,
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
            DEEPSEEK_EXPERTS,
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
}
