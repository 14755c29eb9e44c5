"""The properties of a model family that are not in its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# The types of layers in configs. Recurrent ones are LINEAR, except short convolutions.
FULL, SLIDING, MLP, EXPERTS = "full_attention", "sliding_attention", "mlp", "moe"
LINEAR, CONV = "linear_attention", "conv"
RecurrentKind = Literal[
    "short_conv", "mamba1", "falcon_mamba", "jamba", "mamba2", "gated_delta", "kimi_delta"
]

LayerTypes = Callable[[Mapping[str, object], int], list[str]]
"""The type of each layer, from the settings and the number of layers, if `layer_types` is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The names of a layer's norms in a checkpoint. None: there is no such norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of tensors in a layer of a checkpoint; {} stands for the number of the expert.

    Attributes:
        router: The name of the router, without "weight" or "bias".
        gate: The same for the gate projection of an expert; "": experts have no gate.
        up: The same for the up projection.
        down: The same for the down projection.
        correction: The tensor of score corrections; see `kernels.experts.route`.
        stacked: The prefix of tensors that have the matrices of all experts; see
            `workers.models.stacked_experts`. None: each matrix is a tensor.
        stacked_parts: The rest of these names: for gate and up, and for down.
        module: The module of the library that has these matrices, as gate_up_proj and down_proj.
        interleaved: In these, rows of gate and up alternate, and inputs come before outputs.
        shared: The prefix of the shared expert; None: there is none.
        latent: The prefixes of the projections to the routed experts' narrower width and back, in models
            that have them.
        shared_gate: The gate of the shared expert, without "weight": the expert's output is multiplied by the
            sigmoid of this product. "": there is none.
    """

    router: str
    gate: str
    up: str
    down: str
    correction: str = "mlp.gate.e_score_correction_bias"
    stacked: str | None = None
    stacked_parts: tuple[str, str] = ("gate_up_proj", "down_proj")
    module: str = "mlp.experts"
    interleaved: bool = False
    shared: str | None = None
    latent: tuple[str, str] = ("", "")
    shared_gate: str = ""


PRE_NORMS = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


Respelled = Callable[[Mapping[str, object]], Mapping[str, object]]
"""Settings of a family, defaults included, in the spelling that all families have. Raises ModelError."""


def _all_sliding(_: Mapping[str, object], layers: int) -> list[str]:
    return [SLIDING] * layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties of a family that its configs do not contain.

    Attributes:
        defaults: The library's values for absent settings, if they differ from those in `config`. A null
            setting is not absent.
        reads: The settings that this family reads in addition to those that all families read.
        qkv_bias: The q, k and v projections have a bias; None: as `attention_bias` says.
        output_bias: The output projection of attention has a bias; None: as `attention_bias` says.
        mlp_bias: The projections of the MLP have a bias; None: as `mlp_bias` says.
        latent_attention: Attention is latent attention; see `workers.models.latent_attention`.
        qk_norm: Queries and keys are RMS-normalised before the rotation: by head, or the row of all heads.
        norms: The norms of a layer.
        wide_norms: The weight of a norm multiplies before the result is rounded to the model's dtype.
        norm_offset: Added to the weights of norms.
        layer_types: The type of each layer, if the config does not list them.
        windows_opt_in: `sliding_window` is used only if `use_sliding_window` is true.
        rope_by_type: Each type of layer has its own parameters of the rotary embedding.
        scales_embeddings: Embeddings are multiplied by the square root of their width.
        activation: The name of the setting for the activation of the MLP.
        respelled: Converts the settings of a config to the spelling that all families share.
        recurrent: The kind of recurrent layers that may replace attention; None: there are none.
        recurrent_place: The prefix of their parts in a layer of a checkpoint.
        recurrent_names: For the gated delta rule, the projections in a checkpoint: of gates, of the
            convolution's inputs, of b and of a. If the last two, or each two, are fused, then by key head.
        final_norm: The name of the norm before the head in a checkpoint.
        qk_norm_names: The norms of queries and of keys.
        attention: The prefix of the parts of attention in a layer of a checkpoint.
        attention_names: The projections in a checkpoint: q, k and v, or a fused one.
        attention_output: The projection back to the hidden width.
        mlp: The prefix of the MLP in a layer of a checkpoint.
        mlp_down: Its projection back to the hidden width.
        mlp_names: The projections of the MLP in a checkpoint: gate and up, a fused one, or only up.
        gguf_mlp_names: The projections of the MLP in a GGUF file; empty: the same as `mlp_names`.
        gguf_recurrent_names: The same for `recurrent_names`.
        gguf_tiled: GGUF files have the value heads of the gated delta rule in another order; see
            `GatedDeltaConfig`.
        gated_mlp: The MLP has a gate.
        side_by_side: Each layer has a recurrent layer beside its attention.
        one_sublayer: Each layer is a single sublayer: attention, a recurrent layer, or an MLP.
        renamed: Replacements in names of tensors: (part, its spelling in checkpoints of other families, or in
            the library). The first match counts.
        experts: The names of the experts' tensors; None: no layer has experts.
        wide_routing: The router's expert weights stay float32.
        expert_biases: The router and the projections of experts have biases.
        clamped_gate: The gate of experts is always `clamped_swiglu`.
        sinks: Each head has an attention sink: a logit that is a term of the softmax and has no value.
        sigmoid_routing: Experts are chosen by sigmoids; see `kernels.experts`.
        routing_eps: Added to the sum by which the expert weights are divided.
        wide_router: The router and its product are float32.
        left_out: The prefixes of tensors that a forward does not need; {} stands for the number of layers.
        mtp_names: The prefixes of tensors of an MTP head, and their spelling in checkpoints of DeepSeek.
            Empty: there is none, or no native code for it. See `mtp_head`.
        mtp_feeds_normed: The MTP head continues from the output of its last norm, not from its input.
        gated_attention: The output of attention is multiplied by sigmoid(gate). The query projection also
            has the gates: each head's after its query.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    latent_attention: bool = False
    qk_norm: Literal["none", "head", "row"] = "none"
    norms: NormNames = PRE_NORMS
    wide_norms: bool = False
    norm_offset: float = 0.0
    layer_types: LayerTypes = _all_sliding
    windows_opt_in: bool = False
    rope_by_type: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"
    respelled: Respelled = dict
    recurrent: RecurrentKind | None = None
    recurrent_place: str = "mamba"
    recurrent_names: tuple[str, ...] = ()
    final_norm: str = "norm"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    attention: str = "self_attn"
    attention_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    mlp_down: str = "down_proj"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj")
    gguf_mlp_names: tuple[str, ...] = ()
    gguf_recurrent_names: tuple[str, ...] = ()
    gguf_tiled: bool = False
    gated_mlp: bool = True
    side_by_side: bool = False
    one_sublayer: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    experts: ExpertNames | None = None
    wide_routing: bool = False
    expert_biases: bool = False
    clamped_gate: bool = False
    sinks: bool = False
    sigmoid_routing: bool = False
    routing_eps: float = 0.0
    wide_router: bool = False
    left_out: tuple[str, ...] = ()
    mtp_names: tuple[tuple[str, str], ...] = ()
    mtp_feeds_normed: bool = True
    gated_attention: bool = False

    def renamed_tensor(self, name: str) -> str:
        """The name of a tensor in the spelling of other families' checkpoints."""
        for before, after in self.renamed:
            if before in name:
                return name.replace(before, after, 1)
        return name


def defaults(*sizes: int | None, **more: object) -> dict[str, object]:
    """The defaults of a family. `sizes`: the values of `_SIZES`, in order."""
    return dict(zip(_SIZES, sizes, strict=True)) | more


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
