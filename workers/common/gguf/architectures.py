"""The architectures of GGUF files, and the keys that their files may have.

A key that is not listed refuses the file, since it may change the model. Sources: as for
`workers.common.gguf.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown

# Settings of a config.json, and the keys that have them. Without one of the first the model is not known.
NEEDED = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WIDTH, WIDTH_OF_EXPERTS = "feed_forward_length", "expert_feed_forward_length"
KV_HEADS = "attention.head_count_kv"
# How hidden states become an embedding. It changes no logits.
POOLING = "pooling_type"
# Which layers are recurrent; and how many layers behind the others predict several tokens, and are not read.
INTERVAL, RECURRENT_LAYERS, MORE_LAYERS = (
    "full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers",
)  # fmt: skip
SSM = frozenset(
    {"ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"}
)
_COMMON = frozenset({
    *NEEDED.values(),
    RMS_EPS, LAYER_EPS, WIDTH, KV_HEADS, "attention.key_length", "attention.value_length", "vocab_size",
    "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    # Keys about the origin of a file.
    "rope.scaling.finetuned", "tensor_data_layout", "attention.causal",
    POOLING,
})  # fmt: skip
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
SHARED_EXPERT = "expert_shared_feed_forward_length"
# How experts are chosen.
SOFTMAX, SIGMOID = 1, 2
# Values without an effect: softmax, and no shared experts but those whose width is named.
_ONLY: Mapping[str, Value] = {"expert_gating_func": SOFTMAX, "expert_shared_count": 0}
_ONLY_SIGMOID: Mapping[str, Value] = {"expert_gating_func": SIGMOID}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What files of an architecture can be.

    Attributes:
        model_type: That of the config.
        reads: The keys that its files may have beside the common ones and those below.
        interleaved: The rows of queries and keys are in the order of pairs that are beside each other.
        norm_offset: What the file's weights of norms have more than a checkpoint's.
        recurrent_without_heads: Its recurrent layers are those without heads of keys and values.
        norm_eps: The setting that is added to variances, and its key.
        settings: More settings, by the keys that have them.
        present: Settings that are true if layers have such a tensor.
        defaults: What settings are if a file does not say them. None: that is refused.
        only: The values of keys that have no effect.
        rotates: The model rotates queries and keys.
        rotates_parts: It can rotate a part of each head.
        varies: Widths and numbers of heads may differ between layers, as its reader knows.
    """

    model_type: str
    reads: frozenset[str] = field(default_factory=frozenset)
    interleaved: bool = False
    norm_offset: float = 0.0
    recurrent_without_heads: bool = False
    norm_eps: tuple[str, str] = ("rms_norm_eps", RMS_EPS)
    settings: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, Value] = field(default_factory=lambda: _ONLY)
    rotates: bool = True
    rotates_parts: bool = True
    varies: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """The keys that its files may have."""
        return _COMMON | self.reads | {self.norm_eps[1], *self.settings, *self.only}


GPT_OSS, LATENT, BAICHUAN = "gpt-oss", "deepseek2", "baichuan"
_DELTA_RULE_READS = SSM | {RECURRENT_LAYERS}
# Keys for images, which have positions in three dimensions, and states that are added after some layers. A
# text has the same position in all, and none of these states.
_SECTIONS = frozenset({"rope.dimension_sections"})
_IMAGES = _SECTIONS | {"n_deepstack_layers"}
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_WINDOW = frozenset({"attention.sliding_window"})
_WINDOWS = _WINDOW | {"attention.sliding_window_pattern"}
_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_LEFT_OUT_LAYERS = {MORE_LAYERS: "mtp_num_hidden_layers"}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    WIDTH_OF_EXPERTS: "moe_intermediate_size",
}
_QWEN_SHARED_EXPERT = _QWEN_EXPERTS | {SHARED_EXPERT: "shared_expert_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_DEEPSEEK_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    WIDTH_OF_EXPERTS: "moe_intermediate_size",
}
_DELTA_RULE = _LEFT_OUT_LAYERS | {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    INTERVAL: "full_attention_interval",
}
# llama.cpp normalises for each of them, but qwen2moe.
_QWEN_DEFAULTS = dict[str, object].fromkeys(_QWEN_EXPERTS.values()) | {"norm_topk_prob": True}
_QWEN_SHARED_DEFAULTS = _QWEN_DEFAULTS | {"shared_expert_intermediate_size": None}
_LOCAL_DEFAULTS = dict[str, object].fromkeys(_LOCAL_EXPERTS.values())
_MAMBA2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
_NEMOTRON = Architecture(
    "nemotron_h",
    SSM,
    recurrent_without_heads=True,
    norm_eps=("layer_norm_epsilon", RMS_EPS),
    settings={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    present={
        "attention_bias": "attn_q.bias",
        "mlp_bias": "ffn_up.bias",
        "use_bias": "ssm_in.bias",
        "use_conv_bias": "ssm_conv1d.bias",
    },
    rotates=False,
)
_MAMBA = Architecture(
    "mamba",
    SSM | {"ssm.dt_b_c_rms"},
    norm_eps=("layer_norm_epsilon", RMS_EPS),
    settings={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
    },
    present={"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"},
    rotates=False,
)
_LFM2 = Architecture(
    "lfm2",
    recurrent_without_heads=True,
    norm_eps=("norm_eps", RMS_EPS),
    settings={"shortconv.l_cache": "conv_L_cache"},
    present={"conv_bias": "shortconv.conv.bias"},
    defaults={"block_auto_adjust_ff_dim": False, "conv_L_cache": None},
)
ARCHITECTURES = {
    "llama": Architecture("llama", _EXPERTS | _WINDOW, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture(
        "qwen2_moe", settings=_QWEN_SHARED_EXPERT, defaults=_QWEN_SHARED_DEFAULTS | {"norm_topk_prob": False}
    ),
    "qwen3moe": Architecture("qwen3_moe", settings=_QWEN_EXPERTS, defaults=_QWEN_DEFAULTS),
    "qwen3next": Architecture(
        "qwen3_next",
        _DELTA_RULE_READS,
        norm_offset=1.0,
        settings=_DELTA_RULE | _QWEN_SHARED_EXPERT,
        defaults=_QWEN_SHARED_DEFAULTS,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", _DELTA_RULE_READS | _SECTIONS, norm_offset=1.0, settings=_DELTA_RULE
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _DELTA_RULE_READS | _SECTIONS,
        norm_offset=1.0,
        settings=_DELTA_RULE | _QWEN_SHARED_EXPERT,
        defaults=_QWEN_SHARED_DEFAULTS,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        settings={**_LFM2.settings, **_QWEN_EXPERTS, "leading_dense_block_count": "num_dense_layers"},
        present={**_LFM2.present, "use_expert_bias": "exp_probs_b.bias"},
        only=_ONLY_SIGMOID,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        SSM,
        settings=_MAMBA2 | {"ssm.inner_size": "mamba_d_ssm"},
        present=_ATTENTION_BIAS
        | {
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "mamba_rms_norm": "ssm_norm.weight",
            "mlp_bias": "ffn_up.bias",
            "projectors_bias": "ssm_out.bias",
        },
        # Its weights are multiplied already by what a config names.
        defaults={"mamba_norm_before_gate": False},
    ),
    "mamba": _MAMBA,
    "mamba2": replace(
        _MAMBA,
        model_type="mamba2",
        settings={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "num_heads",
            "ssm.group_count": "n_groups",
        },
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        settings={
            **_NEMOTRON.settings,
            **_LEFT_OUT_LAYERS,
            **_DEEPSEEK_EXPERTS,
            "moe_latent_size": "moe_latent_size",
            SHARED_EXPERT: "moe_shared_expert_intermediate_size",
        },
        only={"expert_gating_func": SIGMOID, "expert_shared_count": 1},
    ),
    "jamba": Architecture(
        "jamba",
        SSM,
        recurrent_without_heads=True,
        settings={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_used_count": "num_experts_per_tok",
            "expert_count": "num_experts",
        },
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        rotates=False,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        SSM | _SCALES | {SHARED_EXPERT},
        interleaved=True,
        recurrent_without_heads=True,
        settings=_MAMBA2 | _LOCAL_EXPERTS,
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        defaults={"num_local_experts": 0, "num_experts_per_tok": 0, "gguf_layout": True},
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        _WINDOW,
        norm_offset=1.0,
        settings=_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma3": Architecture("gemma3_text", _WINDOWS | {"rope.freq_base_swa"}, norm_offset=1.0, settings=_CAP),
    "phi3": Architecture("phi3", _WINDOW),
    GPT_OSS: Architecture(
        "gpt_oss",
        _WINDOW,
        settings=_LOCAL_EXPERTS | {WIDTH_OF_EXPERTS: "intermediate_size"},
        defaults=_LOCAL_DEFAULTS | {"rope_parameters": {"rope_type": "default"}},
    ),
    LATENT: Architecture(
        "deepseek_v3",
        frozenset(
            {
                "expert_gating_func",
                "attention.key_length_mla",
                "attention.value_length_mla",
                "rope.scaling.yarn_log_multiplier",
            }
        ),
        settings=_DEEPSEEK_EXPERTS
        | _LEFT_OUT_LAYERS
        | {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
        defaults={
            **dict.fromkeys(_DEEPSEEK_EXPERTS.values()),
            "kv_lora_rank": None,
            "q_lora_rank": None,  # may be missing
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        only={},
    ),
    "granite": Architecture("granite", _SCALES, interleaved=True),
    "granitemoe": Architecture(
        "granitemoeshared",
        _SCALES,
        interleaved=True,
        settings=_LOCAL_EXPERTS | {SHARED_EXPERT: "shared_intermediate_size"},
        defaults=_LOCAL_DEFAULTS | {"shared_intermediate_size": 0, "gguf_layout": True},
    ),
    "olmo2": Architecture("olmo2", _WINDOWS | {"rope.freq_base_swa"}),
    "smollm3": Architecture("smollm3", interleaved=True),
    "arcee": Architecture("arcee", interleaved=True),
    # What computes as another family does.
    "exaone": Architecture("llama"),
    "internlm2": Architecture("llama", interleaved=True),
    BAICHUAN: Architecture("llama", interleaved=True),
    "ernie4_5": Architecture("llama", interleaved=True),
    "minicpm": Architecture("granite", _SCALES - {"attention.scale"}, interleaved=True),
    "seed_oss": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2", _SECTIONS),
    "qwen3vl": Architecture("qwen3", _IMAGES),
    "qwen3vlmoe": Architecture("qwen3_moe", _IMAGES, settings=_QWEN_EXPERTS, defaults=_QWEN_DEFAULTS),
    # Architectures that the transformers library runs.
    "afmoe": Architecture(
        "afmoe",
        _WINDOW,
        settings={
            **_QWEN_EXPERTS,
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        # As llama.cpp, whose files do not say it.
        defaults={"mup_enabled": True, "num_shared_experts": 0},
        only={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
        rotates_parts=False,
    ),
    "apertus": Architecture("apertus", present=_ATTENTION_BIAS),
    "chatglm": Architecture("glm", defaults={"pad_token_id": None}),
    "command-r": Architecture(
        "cohere",
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"logit_scale": "logit_scale"},
        present={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
        rotates_parts=False,
    ),
    "cohere2": Architecture(
        "cohere2",
        _WINDOWS,
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"logit_scale": "logit_scale"},
        present={"attention_bias": "attn_q.bias"},
        rotates_parts=False,
    ),
    "dots1": Architecture(
        "dots1",
        settings=_DEEPSEEK_EXPERTS,
        only=_ONLY_SIGMOID,
        present=_ATTENTION_BIAS,
        defaults={"sliding_window": None},
        rotates_parts=False,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        # The width of shared experts follows from their number; what files say of it is another.
        frozenset({SHARED_EXPERT}),
        settings={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
            WIDTH_OF_EXPERTS: "moe_intermediate_size",
        },
        present={"use_bias": "attn_q.bias"},
        only={"expert_gating_func": SOFTMAX},
        rotates_parts=False,
    ),
    "exaone4": Architecture("exaone4", _WINDOWS, rotates_parts=False),
    "gemma3n": Architecture(
        "gemma3n_text",
        _WINDOWS | {"rope.freq_base_swa", "activation_sparsity_scale"},
        settings=_CAP
        | {
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        rotates=False,  # as its reader knows
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _WINDOWS
        | {
            "attention.key_length_swa",
            "attention.value_length_swa",
            "rope.freq_base_swa",
            "rope.dimension_count_swa",
        },
        settings=_CAP
        | {
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            WIDTH_OF_EXPERTS: "moe_intermediate_size",
        },
        present={"enable_moe_block": "ffn_gate_inp.weight", "attention_bias": "attn_q.bias"},
        rotates=False,  # as its reader knows
        varies=True,
    ),
    "glm4": Architecture(
        "glm4",
        settings=_LEFT_OUT_LAYERS,
        present=_ATTENTION_BIAS,
        defaults={"pad_token_id": None},  # the default may be no token of the model
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        settings=_DEEPSEEK_EXPERTS | _LEFT_OUT_LAYERS,
        present=_ATTENTION_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
        only=_ONLY_SIGMOID,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", present=_ATTENTION_BIAS, rotates_parts=False),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        # It has one shared expert, of the width that the others have.
        frozenset({WIDTH_OF_EXPERTS, SHARED_EXPERT}),
        settings={"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        present=_ATTENTION_BIAS,
        only={"expert_gating_func": SOFTMAX, "expert_shared_count": 1},
        rotates_parts=False,
    ),
    "minimax-m2": Architecture(
        "minimax_m2", frozenset({WIDTH_OF_EXPERTS}), settings=_LOCAL_EXPERTS, only=_ONLY_SIGMOID
    ),
    "mistral3": Architecture(
        "ministral3",
        frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        interleaved=True,
        defaults={"sliding_window": None},
    ),
    "nemotron": Architecture(
        "nemotron",
        norm_offset=1.0,
        norm_eps=("norm_eps", LAYER_EPS),
        present=_ATTENTION_BIAS | {"mlp_bias": "ffn_up.bias"},
    ),
    "olmo": Architecture(
        "olmo",
        interleaved=True,
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"attention.clamp_kqv": "clip_qkv"},
        rotates_parts=False,
    ),
    "olmoe": Architecture(
        "olmoe",
        frozenset({WIDTH_OF_EXPERTS}),
        settings={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        rotates_parts=False,
    ),
    "phi2": Architecture("phi", norm_eps=("layer_norm_eps", LAYER_EPS)),
    "stablelm": Architecture(
        "stablelm",
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"use_parallel_residual": "use_parallel_residual"},
        present={"use_qkv_bias": "attn_q.bias"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        norm_eps=("norm_epsilon", LAYER_EPS),
        present={"use_bias": "attn_q.bias"},
        defaults={"sliding_window": None},  # as llama.cpp, whose files have none
        rotates_parts=False,
    ),
}


def architecture_of(metadata: Mapping[str, Value]) -> tuple[str, Architecture]:
    """The name and the description of a file's architecture. Raises GgufError."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise GgufError(f"general.architecture: must be the name of an architecture, got {shown(name)}")
    if name not in ARCHITECTURES:
        raise GgufError(f"general.architecture: {shown(name)} is not served: docs/models.md has what is")
    return name, ARCHITECTURES[name]


def check_keys(name: str, architecture: Architecture, own: Mapping[str, Value]) -> None:
    """Raises GgufError for a key that may change the model, and is not read."""
    known, only = architecture.keys, {"attention.causal": True, **architecture.only}
    for key, value in own.items():
        if key not in known or value != only.get(key, value):
            raise GgufError(f"{name}.{key}: is not supported, got {shown(value)}")
