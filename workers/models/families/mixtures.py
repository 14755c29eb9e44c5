"""Families of attention and a mixture of experts. See `workers.models.registry`."""

from __future__ import annotations

from dataclasses import replace

from workers.models.families.dense import (
    GRANITE_READS,
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    QWEN_WINDOWS,
    WINDOW,
)
from workers.models.family import ExpertNames, Family, defaults
from workers.models.respelled import (
    every_other_below_max_window_layers,
    full_every,
    granite_moe_settings,
    qwen2_moe_settings,
)
from workers.models.values import names

QWEN_EXPERTS = ExpertNames(
    "mlp.gate",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
    stacked="mlp.experts.",
)
QWEN_SHARED_EXPERTS = replace(QWEN_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
QWEN_EXPERTS_READS = names(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step"
    " norm_topk_prob mlp_only_layers"
)
MIXTRAL_EXPERTS = ExpertNames(
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
    interleaved=True,
)
GRANITE_MOE = Family(
    defaults=LLAMA_DEFAULTS
    | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"},
    reads=GRANITE_READS | names("num_local_experts num_experts_per_tok"),
    respelled=granite_moe_settings,
    mlp="shared_mlp",
    mlp_names=("input_linear",),
    mlp_down="output_linear",
    experts=_GRANITE_EXPERTS,
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    reads=GRANITE_MOE.reads | names("shared_intermediate_size gguf_layout"),
    gguf_mlp_names=("gate_linear", "up_linear"),
)

MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        defaults=MISTRAL_DEFAULTS
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        reads=WINDOW | {"num_experts_per_tok", "num_local_experts"},
        qkv_bias=False,
        output_bias=False,
        experts=MIXTRAL_EXPERTS,
        wide_routing=True,
        renamed=((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),  # MLX's names
    ),
    "qwen2_moe": Family(
        defaults=defaults(
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
        reads=QWEN_EXPERTS_READS | QWEN_WINDOWS | names("qkv_bias shared_expert_intermediate_size"),
        layer_types=every_other_below_max_window_layers,
        respelled=qwen2_moe_settings,
        output_bias=False,
        windows_opt_in=True,
        experts=QWEN_SHARED_EXPERTS,
    ),
    "qwen3_moe": Family(
        defaults=defaults(
            *(151936, 2048, 6144, 24, 32, 32768, None, None),
            num_key_value_heads=4,
            sliding_window=4096,
            num_experts_per_tok=8,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        reads=QWEN_EXPERTS_READS | names("sliding_window use_sliding_window"),
        qk_norm="head",
        windows_opt_in=True,
        experts=QWEN_EXPERTS,
    ),
    "gpt_oss": Family(
        defaults=defaults(
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
        reads=WINDOW
        | names("layer_types num_local_experts num_experts num_experts_per_tok swiglu_alpha swiglu_limit"),
        wide_norms=True,
        layer_types=full_every(2),
        experts=_GPT_OSS_EXPERTS,
        expert_biases=True,
        clamped_gate=True,
        sinks=True,
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
}
