"""Builds a decoder from a config: its sublayers, and the names of their parts in a checkpoint.

Dimension letters: C hidden width; H query heads; K key-value heads; D head width; I intermediate width.
"""

from __future__ import annotations

import torch

from kernels.experts import ExpertWeights
from workers import huge_pages
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, Layer
from workers.models.experts import Experts
from workers.models.layers import Attention, AttentionShape, Body, GatedMlp, Norm, Sublayer
from workers.models.linear import Linear


def build_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Allocate a decoder. Its parameters are uninitialised until they are filled.

    On the device "meta" nothing is allocated, and its `targets` list the tensors that a checkpoint must have.
    """
    parts = _Parts(config, dtype, device)
    embedding = parts.empty(config.vocab_size, config.hidden_size)
    lm_head = embedding
    if not config.tie_word_embeddings:
        lm_head = parts.empty(config.vocab_size, config.hidden_size)
    layers = [parts.layer(index) for index in range(config.num_hidden_layers)]
    final_norm = parts.norm("norm")
    assert final_norm is not None
    return Decoder(config, embedding, layers, final_norm, lm_head)


class _Parts:
    """Makes the parts of one model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self._config = config
        self._family = config.family
        self._dtype = dtype
        self._device = device

    def empty(self, *shape: int) -> torch.Tensor:
        return huge_pages.empty(shape, self._dtype, self._device)

    def norm(self, name: str | None) -> Norm | None:
        if name is None:
            return None
        weight = self._norm_weight(self._config.hidden_size)
        return Norm(name, weight, self._config.rms_norm_eps, self._family.norm_offset)

    def layer(self, index: int) -> Layer:
        norms = self._family.norms
        layers = self._config.layers
        sparse_before = sum(layer.sparse for layer in layers[:index])
        mlp = self._experts(sparse_before) if layers[index].sparse else self._mlp()
        return Layer(
            self._sublayer(norms.before_attention, self._attention(index), norms.after_attention),
            self._sublayer(norms.before_mlp, mlp, norms.after_mlp),
        )

    def _sublayer(self, before: str | None, body: Body, after: str | None) -> Sublayer:
        return Sublayer(self.norm(before), body, self.norm(after), self._config.residual_scale)

    def _norm_weight(self, *shape: int) -> torch.Tensor:
        """In float32 if it multiplies before the result is rounded; see `kernels.rms_norm`."""
        dtype = torch.float32 if self._family.wide_norms else self._dtype
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _attention(self, index: int) -> Attention:
        config, family, layer = self._config, self._family, self._config.layers[index]
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rows = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        if len(family.attention_names) == 1:
            rows = {family.attention_names[0]: sum(rows.values())}
        shape = AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            rope=layer.rope,
            eps=config.rms_norm_eps,
        )
        row_norms = None
        if family.qk_norm == "row":
            row_norms = self._norm_weight(heads * width), self._norm_weight(kv_heads * width)
        return Attention(
            index,
            shape,
            qkv=Linear.allocate(self.empty, config.hidden_size, rows, bias=config.attention_bias),
            output=Linear.allocate(
                self.empty,
                heads * width,
                {"o_proj": config.hidden_size},
                bias=config.attention_output_bias,
            ),
            head_norm=self._norm_weight(heads + kv_heads, width) if family.qk_norm == "head" else None,
            row_norms=row_norms,
            norm_offset=family.norm_offset,
            is_last=index == config.num_hidden_layers - 1,
        )

    def _mlp(self) -> GatedMlp:
        config = self._config
        names, bias = self._family.mlp_names, config.mlp_bias
        rows = dict.fromkeys(names, 2 * config.intermediate_size // len(names))
        gate_up = Linear.allocate(self.empty, config.hidden_size, rows, bias=bias)
        down = Linear.allocate(
            self.empty, config.intermediate_size, {"down_proj": config.hidden_size}, bias=bias
        )
        return GatedMlp(gate_up, down, config.activation)

    def _experts(self, index: int) -> Experts:
        config, family = self._config, self._family
        assert config.experts is not None and family.experts is not None
        return Experts(
            config.experts,
            family.experts,
            config.activation,
            router=self.empty(config.experts.count, config.hidden_size),
            gate_up=self._expert_weights(2 * config.experts.intermediate_size, config.hidden_size),
            down=self._expert_weights(config.hidden_size, config.experts.intermediate_size),
            wide_routing=family.wide_routing,
            index=index,
        )

    def _expert_weights(self, outputs: int, inputs: int) -> ExpertWeights:
        """[E, outputs, inputs]: one tensor on a GPU, elsewhere a list of matrices to be packed one by one."""
        assert self._config.experts is not None
        count = self._config.experts.count
        if torch.device(self._device).type == "cuda":
            return self.empty(count, outputs, inputs)
        return [self.empty(outputs, inputs) for _ in range(count)]
