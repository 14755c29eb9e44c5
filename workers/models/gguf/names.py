"""The names of tensors in GGUF files, and in the checkpoints of a family.

Source: gguf-py/gguf/tensor_mapping.py of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.common.gguf.settings import EMBEDDING, HEAD
from workers.models.family import ExpertNames, Family
from workers.models.latent_parts import PARTS_OF_LATENTS

_DELTA_RULE = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_in": "in_proj_qkvz",
    "ssm_ba": "in_proj_ba",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
}
_SCAN = {"ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_OF_HEADS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_MAMBA1 = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_out": "out_proj",
    **{f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")},
}
_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    **{f"attn_{part}": part for part in PARTS_OF_LATENTS},
}
_SHORT_CONV = {f"shortconv.{part}": part for part in ("conv", "in_proj", "out_proj")}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of tensors in checkpoints of a family, by their names in GGUF files.

    Attributes:
        outside: Tensors outside of layers.
        modules: In a layer, names without "weight" or "bias".
        whole: In a layer, full names of tensors whose endings differ, too.
        experts: In a layer, tensors of all experts, each with the names for one expert, which get equal parts
            of its rows.
    """

    outside: Mapping[str, str]
    modules: Mapping[str, str]
    whole: Mapping[str, str]
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, more: Names) -> Names:
        """The names of both."""
        return Names(
            {**self.outside, **more.outside},
            {**self.modules, **more.modules},
            {**self.whole, **more.whole},
            {**self.experts, **more.experts},
        )

    def in_checkpoint(self, part: str) -> str | None:
        """The name in a layer of a checkpoint, by the name in a file. None: unknown."""
        module, _, kind = part.rpartition(".")
        known = self.modules.get(module)
        return self.whole.get(part, known and f"{known}.{kind}")

    def in_file(self, name: str) -> str:
        """The reverse. For a tensor of one expert, the name of the tensor of all. Unknown names stay."""
        for ours, theirs in self.outside.items():
            if name == theirs:
                return ours
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        module, _, kind = part.rpartition(".")
        module = _NUMBER.sub("{}", module)
        reverse = {theirs: ours for ours, theirs in self.modules.items()}
        reverse |= {theirs[0]: ours for ours, theirs in self.experts.items() if len(theirs) == 1}
        whole = {theirs: ours for ours, theirs in self.whole.items()}
        return f"blk.{layer}.{whole.get(part, f'{reverse.get(module, module)}.{kind}')}"

    def are_of_experts(self, name: str) -> bool:
        """Whether a tensor of a file has the tensors of all experts."""
        return name.rpartition(".")[0].rpartition(".")[2] in self.experts


def names_of(family: Family) -> Names:
    """The names for a family."""
    modules = _attention(family) | _norms(family) | _gated_mlp(family, family.mlp, "")
    whole = {"attn_sinks.weight": "self_attn.sinks"} if family.sinks else {}
    if family.sigmoid_routing and family.experts is not None:
        whole["exp_probs_b.bias"] = family.experts.correction
    if family.side_by_side:
        # A mistake of Falcon-H1's converter, which llama.cpp accepts.
        whole["ffn_norm"] = f"{family.norms.before_mlp}.weight"
    match family.recurrent:
        case "short_conv":
            modules |= {ours: f"conv.{theirs}" for ours, theirs in _SHORT_CONV.items()}
        case "jamba" | "mamba1" | "falcon_mamba":
            place = family.recurrent_place
            modules |= {ours: f"{place}.{theirs}" for ours, theirs in _MAMBA1.items()}
            whole |= {"ssm_a": f"{place}.A_log", "ssm_d": f"{place}.D"}
        case "mamba2" | "gated_delta" as kind:
            place = family.recurrent_place
            scan = _SCAN | ({"ssm_in": "in_proj"} if kind == "mamba2" else _DELTA_RULE)
            modules |= {ours: f"{place}.{theirs}" for ours, theirs in scan.items()}
            whole |= {ours: f"{place}.{theirs}" for ours, theirs in _OF_HEADS.items()}
    experts: Mapping[str, tuple[str, ...]] = {}
    if family.experts is not None:
        modules |= _beside_experts(family, family.experts)
        names = family.experts
        gates = {"ffn_gate_exps": (names.gate,), "ffn_gate_up_exps": (names.gate, names.up)}
        experts = (gates if names.gate else {}) | {"ffn_up_exps": (names.up,), "ffn_down_exps": (names.down,)}
    # LFM2's last norm has another name by a mistake of its converter.
    norm = "token_embd_norm" if family.recurrent == "short_conv" else "output_norm"
    outside = {
        EMBEDDING: "model.embed_tokens.weight",
        f"{norm}.weight": f"model.{family.final_norm}.weight",
        f"{norm}.bias": f"model.{family.final_norm}.bias",
        HEAD: "lm_head.weight",
        "output.bias": "lm_head.bias",
    }
    return Names(outside, modules, whole, experts)


def _attention(family: Family) -> dict[str, str]:
    files = ("attn_qkv",) if len(family.attention_names) == 1 else ("attn_q", "attn_k", "attn_v")
    names = dict(zip(files, family.attention_names, strict=True))
    names |= dict(zip(("attn_q_norm", "attn_k_norm"), family.qk_norm_names, strict=True))
    names["attn_output"] = family.attention_output
    if family.latent_attention:
        names |= _LATENT
    return {ours: f"{family.attention}.{theirs}" for ours, theirs in names.items()}


def _norms(family: Family) -> dict[str, str]:
    norms = family.norms
    if family.one_sublayer:
        places = {"attn_norm": norms.before_attention}
    elif norms.after_attention is not None:
        places = {
            "attn_norm": norms.before_attention,
            "post_attention_norm": norms.after_attention,
            "ffn_norm": norms.before_mlp,
            "post_ffw_norm": norms.after_mlp,
        }
    else:
        # Converters have used either name; the last one is written.
        either = ["post_attention_norm", "ffn_norm"]
        if family.sinks or family.recurrent == "gated_delta":
            either.reverse()
        places = {"attn_norm": norms.before_attention, **dict.fromkeys(either, norms.before_mlp)}
    return {ours: theirs for ours, theirs in places.items() if theirs is not None}


def _gated_mlp(family: Family, place: str, suffix: str) -> dict[str, str]:
    names = family.gguf_mlp_names or family.mlp_names
    files = ("ffn_up",) if len(names) == 1 else ("ffn_gate", "ffn_up")
    found = dict(zip((*files, "ffn_down"), (*names, family.mlp_down), strict=True))
    return {f"{ours}{suffix}": f"{place}.{theirs}" for ours, theirs in found.items()}


def _beside_experts(family: Family, names: ExpertNames) -> dict[str, str]:
    """The names of the router and of the shared expert."""
    found = {"ffn_gate_inp": names.router}
    if names.shared is not None:
        found |= _gated_mlp(family, names.shared, "_shexp")
    if names.shared_gate:
        found["ffn_gate_inp_shexp"] = names.shared_gate
    found |= dict(zip(("ffn_latent_down", "ffn_latent_up"), filter(None, names.latent), strict=False))
    return found
