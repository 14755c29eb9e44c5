"""Multi-head latent attention (MLA): the keys and values of all heads are projections of one narrow vector.

Pages have that vector, the latent, and behind it the part of a key that is rotated, which all heads share.
`kv_b_proj` is not applied to what is in pages: its rows of keys are multiplied by the queries, and its rows
of values by what is attended to (the "absorbed" form). So attention has one key-value head, whose values are
the first elements of its keys.

Source: DeepSeek-V2 (arXiv 2405.04434), and `DeepseekV3Attention` in the transformers library.

Dimension letters: T tokens of the batch; C hidden width; H heads; N and R the parts of a query that are not
rotated, and that are; V width of a value; L width of the latent; Q width of the queries' latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch.nn import functional

from kernels.cpu.kv_write import kv_write
from kernels.linear import DenseWeight, linear
from kernels.packed_pages import LeadingValues, PackedKeys, PackedValues
from kernels.paged_attention import paged_attention, paged_attention_without_first
from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope_reference
from kernels.weight import Weight
from workers.models.config import ModelConfig
from workers.models.layers import ForwardContext, Projected
from workers.models.linear import Linear, LoadTarget
from workers.models.shard import Shard

# Of the norms of latents, whatever the config says of the others.
_EPS = 1e-6


class LatentAttention(Projected):
    """Attention over the latents in the pages of one layer. `kv_b_proj` takes no adapters.

    Attributes:
        index: The number of the layer among those with keys and values.
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
            shard: The part of it whose heads these are.
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
        self._of_keys, self._of_values = ([weight.packed() for weight in each] for each in self._absorbed)
        del self._absorbed, self._key_value

    @cached_property
    def _absorbed(self) -> tuple[list[Weight], list[Weight]]:
        """The rows of `kv_b_proj` for keys, turned: [L, N] of each head; and those for values: [V, L]."""
        sizes = self._sizes
        whole = self._key_value.weight.dense().view(self._heads, sizes.plain + sizes.value, sizes.latent)
        keys, values = torch.split(whole, [sizes.plain, sizes.value], dim=1)
        return (
            [DenseWeight(own.t().contiguous()) for own in keys],
            [DenseWeight(own.contiguous()) for own in values],
        )

    @cached_property
    def _of_keys(self) -> Sequence[Weight]:
        return self._absorbed[0]

    @cached_property
    def _of_values(self) -> Sequence[Weight]:
        return self._absorbed[1]

    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Projected`: [T, H * V] of the rows of `into`. Writes latents to their slots."""
        sizes = self._sizes
        before = projected.shape[1] - sizes.latent - sizes.rotated
        queries, latent, rotated_key = torch.split(projected, [before, sizes.latent, sizes.rotated], dim=1)
        keys = context.kv.layer(self.index)[0]
        assert not isinstance(keys, PackedValues)
        latent = rms_norm(latent.contiguous(), self._latent_norm, _EPS)
        key = torch.cat((latent, self._turned(rotated_key[:, None], context)[:, 0]), dim=1)
        missing = keys.shape[3] - key.shape[1]  # pages may be wider, with zeros, which change no score
        _write(functional.pad(key, (0, missing)), keys, context.inputs.slots)
        if self.is_last and not len(context.inputs.wanted_rows):
            return projected  # only the latents were needed
        if self._query is not None:
            (norm, query), invariant = self._query, context.batch_invariant
            normed = rms_norm(queries.contiguous(), norm, _EPS)
            queries = query(normed, context.lora_slots, batch_invariant=invariant)
        return self._attend(queries.reshape(len(projected), self._heads, -1), missing, keys, context)

    def _attend(
        self, queries: torch.Tensor, missing: int, keys: torch.Tensor | PackedKeys, context: ForwardContext
    ) -> torch.Tensor:
        """[T, H, N + R] -> [T, H * V]."""
        plain, rotated = torch.split(queries, [self._sizes.plain, self._sizes.rotated], dim=2)
        absorbed = _by_head(plain, self._of_keys)  # [T, H, L]
        query = torch.cat((absorbed, self._turned(rotated, context)), dim=2)
        attend = paged_attention_without_first if self._is_mtp_head else paged_attention
        attended = attend(
            functional.pad(query, (0, missing)),
            keys,
            LeadingValues(keys, self._sizes.latent),
            context.inputs.attention,
            scale=self._config.attention_scale,
            batch_invariant=context.batch_invariant,
        )  # [T, H, L]
        return _by_head(attended, self._of_values).flatten(1)

    def _turned(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Rotated by the positions, if the layer rotates: [T, H, R] -> [T, H, R]."""
        if self._rope is None:
            return x
        if self._sizes.interleaved:
            x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
        return apply_rope_reference(x, context.rotations[self._rope])


def _by_head(x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """The product of each head with a matrix of its own: [T, H, I] -> [T, H, O]."""
    parts = x.transpose(0, 1).contiguous()  # [H, T, I]
    products = [
        linear(part, weight, batch_invariant=True) for part, weight in zip(parts, weights, strict=True)
    ]
    return torch.stack(products, dim=1)


def _write(key: torch.Tensor, pages: torch.Tensor | PackedKeys, slots: torch.Tensor) -> None:
    """Write keys [T, D] of the only head to their slots. Mutates `pages`."""
    if isinstance(pages, PackedKeys):
        kv_write(key[:, None], None, pages, None, slots)
        return
    used = slots >= 0
    pages.flatten(0, 1).index_copy_(0, slots[used].long(), key[used][:, None])
