"""Builds a decoder from a config: its sublayers, and the names of their parts in a checkpoint.

Dimension letters: C hidden width; H query heads; K key-value heads; D head width; I intermediate width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.experts import ExpertWeights
from kernels.linear import DenseWeight
from kernels.weight import Weight
from workers.models.adapted import Layer
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.experts import ExpertBiases, Experts, WithSharedExpert
from workers.models.family import ExpertNames
from workers.models.latent_attention import LatentAttention
from workers.models.layers import Attention, Body, GatedMlp, Sublayer
from workers.models.linear import Linear
from workers.models.mtp_head import MtpHead
from workers.models.parameters import FormatOf, Parameters
from workers.models.recurrent_layers import RecurrentMixer, SideBySide
from workers.models.recurrent_parts import mixer_parts
from workers.models.registry import FAMILIES
from workers.models.shard import Group, Shard, Slice, scaled

# Routers are never quantised: they are small, and choose experts by small differences.
_ROUTERS = tuple(
    f".{name}.weight"
    for family in FAMILIES.values()
    if family.experts is not None
    for name in (family.experts.router, family.experts.shared_gate)
    if name
)


def is_router(name: str) -> bool:
    """Whether a checkpoint's tensor with this name is a router, or the gate of a shared expert."""
    return name.endswith(_ROUTERS)


def build_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: Group | None = None,
    formats: FormatOf | None = None,
) -> Decoder:
    """Allocate a decoder, or with a group a rank's part of it. Parameters are uninitialised until filled.

    On the device "meta" nothing is allocated, and its `targets` list the tensors that a checkpoint must have.
    With `formats` the matrices that have one are quantised weights.

    Raises UnsupportedError if the model cannot be split over the group.
    """
    shard = Shard.of(config, group)
    if torch.device(device).type == "cuda":
        # For the whole process. Otherwise cuBLAS may add partial sums in half precision.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    parts = _Parts(config, dtype, device, shard, formats)
    embedding = parts.of_vocabulary("model.embed_tokens.weight")
    lm_head = embedding if config.tie_word_embeddings else parts.of_vocabulary("lm_head.weight")
    layers = [parts.layer(index) for index in range(config.num_hidden_layers)]
    final_norm = parts.named_norm(config.family.final_norm)
    mtp_head = parts.mtp_head() if config.has_mtp_head else None
    return Decoder(config, embedding, layers, final_norm, lm_head, shard, mtp_head)


class _Parts(Parameters):
    """Makes the layers of a model, or of a rank's shard of it, of its parameters."""

    def layer(self, index: int) -> Layer:
        norms = self._family.norms
        layers = self._config.layers
        sparse_before = sum(layer.sparse for layer in layers[:index])
        made: list[Sublayer] = []
        if layers[index].attention or layers[index].recurrent:
            mixer = self._mixer(index)
            made.append(self._sublayer(norms.before_attention, mixer, norms.after_attention))
        if layers[index].feed_forward:
            width = self._config.intermediate_size
            dense = not layers[index].sparse
            mlp = self._mlp(index, self._family.mlp, width) if dense else self._sparse(index, sparse_before)
            made.append(self._sublayer(norms.before_mlp, mlp, norms.after_mlp))
        return tuple(made)

    def mtp_head(self) -> MtpHead:
        index, width = self._config.num_hidden_layers, self._config.hidden_size
        projection = {"eh_proj": Slice.whole(width, 2 * width)}
        return MtpHead(
            self.linear(f"model.layers.{index}.", projection, bias=False),
            self.named_norm("enorm"),
            self.named_norm("hnorm"),
            self.layer(index),
            self.named_norm("shared_head.norm"),
            feeds_normed=self._family.mtp_feeds_normed,
        )

    def _sublayer(self, before: str | None, body: Body, after: str | None) -> Sublayer:
        scale, group = self._config.residual_scale, self._shard.group
        return Sublayer(self.norm(before), body, self.norm(after), scale, group)

    def _mixer(self, index: int) -> Body:
        layer = self._config.layers[index]
        if layer.recurrent:
            mixer = self._recurrent(index)
            return SideBySide(mixer, self._attention(index)) if layer.attention else mixer
        return self._attention(index) if self._config.latent is None else self._latent_attention(index)

    def _latent_attention(self, index: int) -> LatentAttention:
        config, sizes, place = self._config, self._config.latent, f"model.layers.{index}.self_attn."
        assert sizes is not None
        width, bias = config.hidden_size, config.attention_bias
        shared, own = sizes.latent + sizes.rotated, self._shard.heads

        def of_heads(size: int, inputs: int) -> Slice:
            """The rows of this rank's heads, `size` for each head."""
            return Slice((config.num_attention_heads * size, inputs), (scaled(own, size),), range(inputs))

        queries = sizes.plain + sizes.rotated
        query, first = None, {"q_proj": of_heads(queries, width)}
        if sizes.query_latent is not None:
            second = {"q_b_proj": of_heads(queries, sizes.query_latent)}
            query = self.norm_weight(sizes.query_latent), self.linear(place, second, bias=False)
            first = {"q_a_proj": Slice.whole(sizes.query_latent, width)}
        key_value = {"kv_b_proj": of_heads(sizes.plain + sizes.value, sizes.latent)}
        inner = config.num_attention_heads * sizes.value
        return LatentAttention(
            config,
            self._shard,
            index,
            into=self.linear(place, first | {"kv_a_proj_with_mqa": Slice.whole(shared, width)}, bias=bias),
            query=query,
            key_value=self.linear(place, key_value, bias=False),
            output=self.back(
                place, "o_proj", inner, scaled(own, sizes.value), bias=config.attention_output_bias
            ),
            latent_norm=self.norm_weight(sizes.latent),
        )

    def _recurrent(self, index: int) -> RecurrentMixer:
        parts = mixer_parts(self._config, self._shard)
        place = f"model.layers.{index}.{parts.place}"
        return parts.make(
            into=self.linear(place, parts.into, bias=parts.bias, stored=parts.stored, factors=parts.factors),
            output=self.back(
                place,
                parts.output,
                parts.inner,
                self._shard.part(parts.inner),
                bias=parts.output_bias,
                inputs=parts.inputs,
                multiplier=self._config.multipliers.mixer,
            ),
            parameters={name: (part, self.empty(*part.own_shape)) for name, part in parts.parameters.items()},
            within={
                name: self.linear(place, {name: part}, bias=False) for name, part in parts.within.items()
            },
            # With attention beside it, attention is the last.
            is_last=index == self._config.last_mixer and not self._config.layers[index].attention,
        )

    def _attention(self, index: int) -> Attention:
        config, family = self._config, self._family
        place = f"model.layers.{index}.{family.attention}."
        all_heads = config.num_attention_heads
        heads, kv_heads, width = self._shard.heads, self._shard.kv_heads, config.head_dim
        head_norm = row_norms = None
        if family.qk_norm == "head":
            head_norm = self.norm_weight(len(heads) + len(kv_heads), width)
        elif family.qk_norm == "row":
            row_norms = self.norm_weight(len(heads) * width), self.norm_weight(len(kv_heads) * width)
        sinks = torch.empty(len(heads), dtype=torch.float32, device=self._device) if family.sinks else None
        return Attention(
            config,
            self._shard,
            index,
            qkv=self._qkv(place),
            output=self.back(
                place,
                family.attention_output,
                all_heads * width,
                scaled(heads, width),
                bias=config.attention_output_bias,
                multiplier=config.multipliers.attended,
            ),
            head_norm=head_norm,
            row_norms=row_norms,
            sinks=sinks,
        )

    def _qkv(self, place: str) -> Linear:
        config, names, width = self._config, self._family.attention_names, self._config.head_dim
        counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        sizes = [count * width for count in counts]
        parts = [scaled(own, width) for own in (self._shard.heads, *[self._shard.kv_heads] * 2)]
        if not self._family.gated_attention:
            bias, multipliers = config.attention_bias, config.multipliers.qkv
            return self.projections(place, names, sizes, parts, bias=bias, multipliers=multipliers)
        # A checkpoint has query and gate of each head together; here all gates come first.
        starts = range(0, 2 * sizes[0], 2 * width)[self._shard.heads.start : self._shard.heads.stop]
        rows = [range(start + first, start + first + width) for first in (width, 0) for start in starts]
        hidden = config.hidden_size
        taken = {names[0]: Slice((2 * sizes[0], hidden), tuple(rows), range(hidden))}
        for name, size, part in zip(names[1:], sizes[1:], parts[1:], strict=True):
            taken[name] = Slice((size, hidden), (part,), range(hidden))
        return self.linear(place, taken, bias=config.attention_bias)

    def _mlp(self, index: int, name: str, width: int) -> GatedMlp:
        own = f"{name}."
        place = f"model.layers.{index}.{own}"
        config, names = self._config, self._family.mlp_names
        part, bias = self._shard.part(width), config.mlp_bias
        stored = self._family.gguf_mlp_names if config.gguf_layout else ()
        count = 2 if self._family.gated_mlp else 1
        multipliers = [config.multipliers.gate, 1.0][-count:]
        gate_up = self.projections(
            place, names, [width] * count, [part] * count, bias=bias, stored=stored, multipliers=multipliers
        )
        down = self.back(
            place, self._family.mlp_down, width, part, bias=bias, multiplier=config.multipliers.down
        )
        return GatedMlp(gate_up, down, config.activation, own)

    def _sparse(self, layer: int, index: int) -> Body:
        """Experts, with the shared expert if the family has one. Arguments as for `_experts`."""
        experts, config, names = self._experts(layer, index), self._config.experts, self._family.experts
        assert config is not None and names is not None
        if names.shared is None or not config.shared_size:
            return experts
        gate = None
        if names.shared_gate:
            name = f"model.layers.{layer}.{names.shared_gate}.weight"
            gate = self.matrix({name: 1}, self._config.hidden_size)
        mlp = self._mlp(layer, names.shared, config.shared_size)
        return WithSharedExpert(experts, mlp, gate, names.shared_gate)

    def _router(self, name: str, count: int, width: int) -> Weight:
        if self._family.wide_router:
            return DenseWeight(self.wide(count, width))
        return self.matrix({name: count}, width)

    def _latent(self, layer: int, names: ExpertNames, size: int) -> tuple[Linear, Linear] | None:
        """The projections to the experts' narrower width and back. None: there are none."""
        if not size:
            return None
        width, place, bias = self._config.hidden_size, f"model.layers.{layer}.", self._config.mlp_bias
        into, back = (
            {name: Slice.whole(*shape)}
            for name, shape in zip(names.latent, ((size, width), (width, size)), strict=True)
        )
        # The ranks' outputs are summed, so only one rank adds the bias.
        back_bias = bias and self._shard.is_first
        return self.linear(place, into, bias=bias), self.linear(place, back, bias=back_bias)

    def _experts(self, layer: int, index: int) -> Experts:
        """The experts of a layer. `index`: its number among the layers with experts."""
        experts, names, width = self._config.experts, self._family.experts, self._config.hidden_size
        assert experts is not None and names is not None
        size, outer, place = experts.intermediate_size, experts.latent or width, f"model.layers.{layer}."
        part = self._shard.part(size)

        def matrices(rows: Mapping[str, int], inputs: int, taken: range) -> ExpertWeights:
            named = [
                {f"{place}{name.format(expert)}.weight": count for name, count in rows.items()}
                for expert in range(experts.count)
            ]
            return self.matrices(named, inputs, taken)

        biases = None
        if self._family.expert_biases:
            sizes = (experts.count,), (experts.count, 2 * len(part)), (experts.count, outer)
            router, into, out_of = (self.empty(*size) for size in sizes)
            biases = ExpertBiases(router, into, out_of, has_down=self._shard.is_first)
        return Experts(
            self._config,
            part,
            index,
            biases=biases,
            router=self._router(f"{place}{names.router}.weight", experts.count, width),
            correction=self.wide(experts.count) if experts.corrected else None,
            latent=self._latent(layer, names, experts.latent),
            gate_up=matrices(
                {name: len(part) for name in (names.gate, names.up) if name}, outer, range(outer)
            ),
            down=matrices({names.down: outer}, size, part),
        )
