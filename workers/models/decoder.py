"""One decoder for all families: attention over the paged KV cache and a SwiGLU block, with pre-RMSNorm.

The config says which parts a model has (QK-norm, biases, tied embeddings, sliding windows, rope scaling). The
q, k and v projections are one matrix, and so are gate and up: a layer is four matrix products.

Knows nothing of sequences, scheduling or sampling.

Dimension letters: T tokens of the batch; R wanted rows; C hidden width; H query heads; K key-value heads;
D head width; I intermediate width; V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.gated_activation import gated_activation
from kernels.linear import linear, pack_weight
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_table
from kernels.rope_kv_write import rope_kv_write
from workers.kv.tensors import KvTensors
from workers.models.config import ModelConfig
from workers.models.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer."""

    input_norm: torch.Tensor  # [C]
    qkv: torch.Tensor  # [(H + 2 * K) * D, C], rows of q, then k, then v
    qkv_bias: torch.Tensor | None  # [(H + 2 * K) * D]
    qk_norm: torch.Tensor | None  # [H + K, D], the q weight for every query head, then the k weight
    output: torch.Tensor  # [C, H * D]
    output_bias: torch.Tensor | None  # [C]
    post_norm: torch.Tensor  # [C]
    gate_up: torch.Tensor  # [2 * I, C], rows of gate, then up
    down: torch.Tensor  # [C, I]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of a checkpoint goes.

    Attributes:
        tensor: A view into a parameter; the checkpoint's tensor broadcasts to it.
        shape: The shape that the tensor has in the checkpoint.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]


class Decoder:
    """A decoder-only model. Parameters are allocated here and filled by `workers.models.weights`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[LayerWeights],
        final_norm: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        """Take over parameters of one dtype and device.

        Args:
            config: The model.
            embedding: [V, C].
            layers: One entry a layer.
            final_norm: [C].
            lm_head: [V, C]; the embedding itself where the two are tied.
        """
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self._scale = config.head_dim**-0.5
        self._rope_table = torch.empty(0, config.head_dim)  # [positions of the pages in use, D]

    @classmethod
    def from_config(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Decoder:
        """Allocate a decoder. Its parameters hold whatever was in memory until they are filled.

        On the device "meta" nothing is allocated, and `targets` says what a checkpoint must have.
        """

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        qkv_rows = (heads + 2 * kv_heads) * config.head_dim
        layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(qkv_rows, hidden),
                qkv_bias=empty(qkv_rows) if config.attention_bias else None,
                qk_norm=empty(heads + kv_heads, config.head_dim) if config.qk_norm else None,
                output=empty(hidden, heads * config.head_dim),
                output_bias=empty(hidden) if config.attention_output_bias else None,
                post_norm=empty(hidden),
                gate_up=empty(2 * config.intermediate_size, hidden),
                down=empty(hidden, config.intermediate_size),
            )
            for _ in range(config.num_hidden_layers)
        ]
        embedding = empty(config.vocab_size, hidden)
        lm_head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        return cls(config, embedding, layers, empty(hidden), lm_head)

    def targets(self) -> dict[str, Target]:
        """Where each tensor of a Hugging Face checkpoint goes, by its name there.

        Together they cover every element of every parameter once. Writing to a target changes the model.
        """
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv_rows = [heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.head_dim]
        found = {
            "model.embed_tokens.weight": _whole(self.embedding),
            "model.norm.weight": _whole(self.final_norm),
        }
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = _whole(self.lm_head)
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            attention = prefix + "self_attn."
            found[prefix + "input_layernorm.weight"] = _whole(layer.input_norm)
            found[prefix + "post_attention_layernorm.weight"] = _whole(layer.post_norm)
            found[attention + "o_proj.weight"] = _whole(layer.output)
            found[prefix + "mlp.down_proj.weight"] = _whole(layer.down)
            for name, part in zip(("gate_proj", "up_proj"), layer.gate_up.chunk(2), strict=True):
                found[f"{prefix}mlp.{name}.weight"] = _whole(part)
            projections = ("q_proj", "k_proj", "v_proj")
            for name, part in zip(projections, torch.split(layer.qkv, qkv_rows), strict=True):
                found[f"{attention}{name}.weight"] = _whole(part)
            if layer.qkv_bias is not None:
                for name, part in zip(projections, torch.split(layer.qkv_bias, qkv_rows), strict=True):
                    found[f"{attention}{name}.bias"] = _whole(part)
            if layer.output_bias is not None:
                found[attention + "o_proj.bias"] = _whole(layer.output_bias)
            if layer.qk_norm is not None:
                parts = torch.split(layer.qk_norm, [heads, kv_heads])
                for name, part in zip(("q_norm", "k_norm"), parts, strict=True):
                    found[f"{attention}{name}.weight"] = Target(part, (config.head_dim,))
        return found

    @torch.inference_mode()
    def pack(self, embedding: torch.Tensor | None = None) -> None:
        """Lay the filled parameters out for the matrix library, one by one; `targets` is of no use any more.

        Args:
            embedding: Another copy of a tied embedding [V, C], such as a mapped file: the one in memory then
                becomes the packed head. Without it a tied head stays plain, so that it is held once.
        """
        if self.lm_head is not self.embedding or embedding is not None:
            self.embedding = self.embedding if embedding is None else embedding
            self.lm_head = pack_weight(self.lm_head)
        for index in range(len(self.layers)):
            # One at a time: each plain matrix is freed before the next one is packed.
            for name in ("qkv", "output", "gate_up", "down"):
                packed = pack_weight(getattr(self.layers[index], name))
                self.layers[index] = dataclasses.replace(self.layers[index], **{name: packed})

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvTensors) -> torch.Tensor:
        """Run the batch through all layers.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots.

        Args:
            inputs: The batch. Positions must be below `max_position_embeddings` and the slots of `kv`, tokens
                below `vocab_size`.
            kv: Pages of this model's shape and dtype.

        Returns:
            [R, C] the final-normed hidden rows of `inputs.wanted_rows`, in that order.
        """
        residual = functional.embedding(inputs.token_ids, self.embedding)  # [T, C]
        cos_sin = self._rope_table_for(kv).index_select(0, inputs.positions)  # [T, D]
        normed = rms_norm(residual, self.layers[0].input_norm, self.config.rms_norm_eps)  # [T, C]
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            query = self._project(index, normed, cos_sin, inputs.slots, kv)  # [T, H, D]
            if index == last and not len(inputs.wanted_rows):
                return normed[:0]  # [0, C]: the batch was for its keys and values only
            attended = paged_attention(
                query,
                *kv.layer(index),
                inputs.attention,
                scale=self._scale,
                sliding_window=self.config.layer_windows[index],
            ).flatten(1)  # [T, H * D]
            if index == last:
                # From here on rows do not meet any more: only the wanted ones go on.
                attended = attended.index_select(0, inputs.wanted_rows)  # [R, H * D]
                residual = residual.index_select(0, inputs.wanted_rows)  # [R, C]
            projected = linear(attended, layer.output, layer.output_bias)
            normed = add_rms_norm(projected, residual, layer.post_norm, self.config.rms_norm_eps)
            projected = linear(gated_activation(linear(normed, layer.gate_up)), layer.down)
            next_norm = self.final_norm if index == last else self.layers[index + 1].input_norm
            normed = add_rms_norm(projected, residual, next_norm, self.config.rms_norm_eps)
        return normed  # [R, C]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden rows.

        Args:
            hidden: [R, C] from `forward`.

        Returns:
            [R, V] in the model's dtype, owned by the caller.
        """
        return linear(hidden, self.lm_head)

    def _rope_table_for(self, kv: KvTensors) -> torch.Tensor:
        """Rotations of all positions that fit into pages: computed for the first step that runs in them."""
        positions = min(self.config.max_position_embeddings, kv.num_pages * kv.page_size)
        if len(self._rope_table) < positions:
            self._rope_table = rope_table(self.config.rope, self.config.head_dim, positions, self.device)
        return self._rope_table

    def _project(
        self, index: int, normed: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor, kv: KvTensors
    ) -> torch.Tensor:
        """Queries, keys and values of a layer. Writes the latter two to their slots in `kv`.

        Args:
            index: Which layer.
            normed: [T, C].
            cos_sin: [T, D] float32.
            slots: [T].
            kv: The pages.

        Returns:
            The queries [T, H, D].
        """
        layer = self.layers[index]
        projected = linear(normed, layer.qkv, layer.qkv_bias)  # [T, (H + 2 * K) * D]
        return rope_kv_write(
            projected, layer.qk_norm, cos_sin, slots, *kv.layer(index), self.config.rms_norm_eps
        )


def _whole(tensor: torch.Tensor) -> Target:
    """A target that the checkpoint has in the same shape."""
    return Target(tensor, tuple(tensor.shape))
