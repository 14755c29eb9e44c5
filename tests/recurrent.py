"""A tiny model of each family with recurrent layers that the transformers library runs over our states."""

from __future__ import annotations

from typing import Any

_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_CONVOLUTIONS = ["conv", "full_attention", "conv"]
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_DELTA_RULE = {
    "layer_types": _HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# What they need besides sizes that all families have.
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": _MAMBA2
    | {"layer_types": _HYBRID, "attention_multiplier": 0.25, "num_local_experts": 0},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _LATENT | {"layer_types": _HYBRID, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": _CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS, "num_dense_layers": 1},
    "lfm3": {"layer_types": _CONVOLUTIONS},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    # Its random states are large, so that all but equal experts are chosen by chance: all are.
    "minimax": {"layer_types": _HYBRID, "block_size": 8, "num_experts": None, "num_local_experts": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "olmo_hybrid": {"layer_types": _HYBRID},
    "qwen3_5_moe_text": _DELTA_RULE | {"shared_expert_intermediate_size": 48},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE | {"shared_expert_intermediate_size": 48},
    "recurrent_gemma": {},
    "rwkv": {"attention_hidden_size": 64, "rescale_every": 2},
    "qwen4_exp_text": _DELTA_RULE
    | {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "shared_expert_intermediate_size": 48,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": 1000,
        "split_ngram_parts": 2,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"hidden_size": 128, "autocast_kernel_dtype": "float32", "chunk_size": 16},
}
