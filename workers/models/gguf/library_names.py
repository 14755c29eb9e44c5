"""Names of tensors of families that only the transformers library runs.

Families with native code are in `workers.models.registry`; when a family gets native code, its entry moves
there. Only the names in these entries are used.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.families.latent import DEEPSEEK_EXPERTS
from workers.models.families.mixtures import MIXTRAL_EXPERTS, QWEN_EXPERTS
from workers.models.family import POST_NORMS, PRE_NORMS, SANDWICH_NORMS, Family, NormNames
from workers.models.gguf.names import Names
from workers.models.remote_code import FUSED

_BEFORE_BOTH = NormNames(before_attention="input_layernorm")
_HUNYUAN = Family(qk_norm_names=("query_layernorm", "key_layernorm"))

LIBRARY_FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        norms=NormNames(
            before_attention="input_layernorm",
            after_attention="post_attention_layernorm",
            before_mlp="pre_mlp_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        experts=replace(DEEPSEEK_EXPERTS, router="mlp.router.gate", correction="mlp.expert_bias"),
        sigmoid_routing=True,
    ),
    "apertus": Family(
        norms=NormNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        mlp_names=("up_proj",),
    ),
    "cohere": Family(norms=_BEFORE_BOTH),
    "cohere2": Family(norms=_BEFORE_BOTH),
    "dots1": Family(experts=DEEPSEEK_EXPERTS, sigmoid_routing=True),
    "ernie4_5_moe": Family(
        experts=replace(DEEPSEEK_EXPERTS, correction="mlp.moe_statics.e_score_correction_bias"),
        sigmoid_routing=True,
    ),
    "exaone4": Family(norms=POST_NORMS),
    "gemma3n_text": Family(norms=SANDWICH_NORMS),
    "gemma4_text": Family(norms=SANDWICH_NORMS),
    "glm": Family(mlp_names=("gate_up_proj",)),
    "glm4": Family(
        norms=NormNames(
            before_attention="input_layernorm",
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        mlp_names=("gate_up_proj",),
    ),
    "glm4_moe": Family(experts=DEEPSEEK_EXPERTS, sigmoid_routing=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN, experts=replace(QWEN_EXPERTS, router="mlp.gate.wg", shared="mlp.shared_mlp")
    ),
    "minimax_m2": Family(
        experts=replace(MIXTRAL_EXPERTS, correction="block_sparse_moe.e_score_correction_bias"),
        sigmoid_routing=True,
    ),
    "ministral3": Family(),
    "nemotron": Family(mlp_names=("up_proj",)),
    "olmo": Family(norms=NormNames()),
    "olmoe": Family(experts=QWEN_EXPERTS),
    "phi": Family(
        norms=_BEFORE_BOTH,
        attention_output="dense",
        mlp_names=("fc1",),
        mlp_down="fc2",
        final_norm="final_layernorm",
    ),
    "stablelm": Family(norms=PRE_NORMS),
    "starcoder2": Family(mlp_names=("c_fc",), mlp_down="c_proj"),
}

_PER_LAYER = Names(
    outside={
        f"per_layer_{ours}.weight": f"model.{theirs}.weight"
        for ours, theirs in (
            ("token_embd", "embed_tokens_per_layer"),
            ("model_proj", "per_layer_model_projection"),
            ("proj_norm", "per_layer_projection_norm"),
        )
    },
    modules={
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    whole={},
)
# Further names. {} stands for the number of a part.
MORE_NAMES: dict[str, Names] = {
    "afmoe": Names(outside={}, modules={"attn_gate": "self_attn.gate_proj"}, whole={}),
    "glm": Names(outside={}, modules={"attn_qkv": FUSED.strip(".")}, whole={}),
    "gemma3n_text": _PER_LAYER
    | Names(
        outside={
            "altup_proj.weight": "model.altup_projections.{}.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
        },
        modules={
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        whole={"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4_text": _PER_LAYER
    | Names(
        outside={},
        modules={
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
        },
        whole={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
    ),
}
