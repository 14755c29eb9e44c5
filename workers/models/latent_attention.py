"""Multi-head latent attention (MLA): the keys and values of all heads are projections of one narrow vector.

Pages store that vector, the latent, and after it the rotated part of a key, which all heads share.
`kv_b_proj` is not applied to pages: its rows for keys are multiplied by the queries, and its rows for values
by the result of attention (the "absorbed" form). So attention has one key-value head, whose values are the
first elements of its keys.

Source: DeepSeek-V2 (arXiv 2405.04434), and `DeepseekV3Attention` in the transformers library.

Dimension letters: T tokens of the batch; C hidden width; H heads; N and R the parts of a query that are not
rotated, and that are; V width of a value; L width of the latent; Q width of the queries' latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from kernels.head_products import HeadWeights, head_products, pack_heads
from kernels.latent_rope_kv_write import latent_rope_kv_write
from kernels.linear import DenseWeight, can_pack
from kernels.packed_pages import LeadingValues, PackedValues
from kernels.paged_attention import paged_attention, paged_attention_without_first
from kernels.rms_norm import rms_norm
from workers.models.config import ModelConfig
from workers.models.layers import ForwardContext, Projected
from workers.models.linear import Linear, LoadTarget
from workers.models.shard import Shard

# The eps of the norms of latents, which does not depend on the config.
_EPS = 1e-6


class LatentAttention(Projected):
    """Latent attention over the pages of one layer. `kv_b_proj` takes no adapters.

    Attributes:
        index: The number of the layer among the layers with keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        index: int,
        *,
        into: Linear,
        query: tuple[torch.Tensor, Linear] | None,
        key_value: Linear,
        output: Linear,
        latent_norm: torch.Tensor,
    ) -> None:
        """Take ownership of parameters.

        Args:
            config: The model.
            shard: The shard of it that these heads belong to.
            index: The number of the layer.
            into: [Q + L + R, C]; or [H * (N + R) + L + R, C] if queries have no latent.
            query: The norm of the queries' latent [Q], and [H * (N + R), Q]; None: queries have no latent.
            key_value: [H * (N + V), L].
            output: [C, H * V].
            latent_norm: [L].
        """
        within = () if query is None else (query[1],)
        super().__init__("self_attn.", into, output, within, is_last=index == config.last_mixer)
        self.index = sum(layer.attention for layer in config.layers[:index])
        self._is_mtp_head = index == config.num_hidden_layers
        self._query = query
        self._key_value, self._latent_norm = key_value, latent_norm
        assert config.latent is not None
        self._config, self._sizes, self._heads = config, config.latent, len(shard.heads)
        self._rope = config.layers[index].rope

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        yield from super().targets(prefix)
        yield from self._key_value.targets(prefix + self.place)
        norms = {"kv_a_layernorm": self._latent_norm}
        if self._query is not None:
            norms["q_a_layernorm"] = self._query[0]
        for name, norm in norms.items():
            yield f"{prefix}{self.place}{name}.weight", LoadTarget(DenseWeight(norm), tuple(norm.shape))

    def pack(self) -> None:
        super().pack()
        if can_pack(self._absorbed[0]):  # otherwise the weights may be replaced in place
            self._of_keys, self._of_values = (pack_heads(weights) for weights in self._absorbed)
            del self._absorbed, self._key_value

    @cached_property
    def _absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `kv_b_proj` for keys, transposed: [H, L, N]; and those for values: [H, V, L]."""
        sizes = self._sizes
        whole = self._key_value.weight.dense().view(self._heads, sizes.plain + sizes.value, sizes.latent)
        keys, values = torch.split(whole, [sizes.plain, sizes.value], dim=1)
        return keys.transpose(1, 2).contiguous(), values.contiguous()

    @cached_property
    def _of_keys(self) -> HeadWeights:
        return self._absorbed[0]

    @cached_property
    def _of_values(self) -> HeadWeights:
        return self._absorbed[1]

    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Projected`: [T, H * V] from the outputs of `into`. Writes latents to their slots."""
        sizes = self._sizes
        before = projected.shape[1] - sizes.latent - sizes.rotated
        rows, queries = projected[:, before:], None
        if not self.is_last or len(context.inputs.wanted_rows):  # otherwise only the latents are needed
            queries = self._queries(projected[:, :before], context)
        keys = context.kv.layer(self.index)[0]
        assert not isinstance(keys, PackedValues)
        rotations = None if self._rope is None else context.rotations[self._rope]
        query = latent_rope_kv_write(
            rows,
            queries,
            self._latent_norm,
            rotations,
            context.inputs.slots,
            keys,
            _EPS,
            interleaved=sizes.interleaved,
        )  # [T, H, L + R], or wider
        if queries is None or query is None:
            return projected
        head_products(queries[..., : sizes.plain], self._of_keys, out=query[..., : sizes.latent])
        attend = paged_attention_without_first if self._is_mtp_head else paged_attention
        attended = attend(
            query,
            keys,
            LeadingValues(keys, sizes.latent),
            context.inputs.attention,
            scale=self._config.attention_scale,
            batch_invariant=context.batch_invariant,
        )  # [T, H, L]
        return head_products(attended, self._of_values).flatten(1)

    def _queries(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, Q], or [T, H * (N + R)], -> [T, H, N + R]."""
        if self._query is not None:
            norm, query = self._query
            normed = rms_norm(projected.contiguous(), norm, _EPS)
            projected = query(normed, context.lora_slots, batch_invariant=context.batch_invariant)
        return projected.view(len(projected), self._heads, -1)
