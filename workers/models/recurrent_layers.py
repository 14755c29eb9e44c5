"""Layers with recurrent states: short convolutions, Mamba 1 and 2, and the gated delta rule.

Dimension letters: as in `kernels.mamba1`, `kernels.mamba2` and `kernels.gated_delta`; D width of the
convolution; T tokens of the batch; C hidden width; P the width of projected rows, and I that of mixed ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kernels.gated_delta import GatedDeltaWeights, gated_delta
from kernels.linear import DenseWeight
from kernels.mamba1 import Mamba1Weights, mamba1
from kernels.mamba2 import Mamba2Weights, mamba2
from kernels.rms_norm import rms_norm
from kernels.short_conv import short_conv, silu_conv
from workers.kv.state_tensors import StateShape
from workers.models.layers import Attention, ForwardContext, Projected, Several
from workers.models.linear import Linear, LoadTarget
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba1Config, Mamba2Config
from workers.models.shard import Group, Slice, normalise_rows

# The prefix of parameters of decays in Kimi Linear.
FORGET = "forget_gate."


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a recurrent layer other than a projection, and this rank's part of it.

    Attributes:
        shape: The shape in the checkpoint.
        rows: The rank's part of the first dimension, in ranges that are adjacent in its tensor.
    """

    shape: tuple[int, ...]
    rows: tuple[range, ...]

    @classmethod
    def whole(cls, *shape: int) -> Parameter:
        """A parameter that every rank has completely."""
        return cls(shape, (range(shape[0]),))

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return sum(map(len, self.rows)), *self.shape[1:]

    def target(self, tensor: torch.Tensor) -> LoadTarget:
        """The load target for a tensor of this part's shape."""
        # The other dimensions are not split.
        taken = Slice((self.shape[0], 1), self.rows, range(max(self.shape)))
        return LoadTarget(DenseWeight(tensor), self.shape, taken=taken)


class RecurrentMixer(Projected):
    """A layer with a recurrent state in place of attention, or beside it.

    Attributes:
        states: The range of its tensors among the model's states. Set by the decoder.
    """

    def __init__(
        self,
        place: str,
        *,
        into: Linear,
        output: Linear,
        parameters: Mapping[str, tuple[Parameter, torch.Tensor]],
        within: Mapping[str, Linear],
        is_last: bool,
    ) -> None:
        """Take ownership of parameters.

        Args:
            place: The prefix of all names in a layer of a checkpoint.
            into: [P, C].
            output: [C, I].
            parameters: The other parameters and their memory, by their names in a checkpoint without `place`.
            within: Projections that `mix` uses, by their names in a checkpoint.
            is_last: See `Projected`.
        """
        super().__init__(place, into, output, within.values(), is_last=is_last)
        self.states = range(0)
        self.parameters = {name: tensor for name, (_, tensor) in parameters.items()}
        self.within = within
        self._targets = {name: parameter.target(tensor) for name, (parameter, tensor) in parameters.items()}

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The shapes of the states that are kept of a sequence."""

    @abstractmethod
    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """[T, P] -> [T, I]. Mutates `states`, which have these shapes for each slot: writes new states."""

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        yield from super().targets(prefix)
        for name, target in self._targets.items():
            yield f"{prefix}{self.place}{name}", target

    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Projected`. Writes the new states."""
        assert context.kv.states is not None
        states = [context.kv.states.tensors[index] for index in self.states]
        return self.mix(projected, states, context)


class ShortConv(RecurrentMixer):
    """Its parameters: conv.weight [C, 1, L], and conv.bias [C] if there is one. Rows of 3 * C become C."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last gated inputs."""
        weight = self.parameters["conv.weight"]
        width, _, length = weight.shape
        return (StateShape((length - 1, width), weight.dtype),)

    @cached_property
    def taps(self) -> torch.Tensor:
        """The filled weight [L, C], as the kernels read it."""
        return self.parameters["conv.weight"][:, 0].t().contiguous()

    @property
    def bias(self) -> torch.Tensor | None:
        """[C], or None."""
        return self.parameters.get("conv.bias")

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        assert context.states is not None
        return short_conv(projected, self.taps, self.bias, states[0], context.states)


class Scan(RecurrentMixer):
    """A convolution, and a float32 state for each head."""

    # The prefixes of the parameters of decays, and of the norm.
    _decays = _norm = ""
    # This rank's part of the loaded decays.
    _own_decays = slice(None)

    def __init__(
        self,
        place: str,
        config: Mamba1Config | Mamba2Config | GatedDeltaConfig,
        *,
        eps: float,
        **parts: Any,
    ) -> None:
        """`parts`: the arguments of `RecurrentMixer`. `eps`: of norms."""
        super().__init__(place, **parts)
        self._config, self._eps = config, eps

    @property
    @abstractmethod
    def weights(self) -> Mamba1Weights | Mamba2Weights | GatedDeltaWeights:
        """The filled parameters, as the kernels read them."""

    @property
    @abstractmethod
    def _head_state(self) -> tuple[int, int]:
        """The shape of the state of a head."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the state of each head."""
        sizes, dtype = self._config, self._convolutions[0].dtype
        return (
            StateShape((sizes.taps - 1, sizes.convolved), dtype),
            StateShape((sizes.heads, *self._head_state), torch.float32),
        )

    @property
    def _convolutions(self) -> Sequence[torch.Tensor]:
        """The weights of the convolutions, in order: [D, 1, L] in all."""
        return (self.parameters["conv1d.weight"],)

    @cached_property
    def _taps(self) -> torch.Tensor:
        """[L, D]."""
        return torch.cat([*self._convolutions])[:, 0].t().contiguous()

    def _shared_weights(self) -> dict[str, Any]:
        """The weights that both Mamba 2 and the gated delta rule have."""
        named = self.parameters
        return {
            "taps": self._taps,
            "dt_bias": named[f"{self._decays}dt_bias"].float(),
            "decays": -torch.exp(named[f"{self._decays}A_log"].float()).flatten()[self._own_decays],
            "norm": named.get(f"{self._norm}norm.weight"),
            "eps": self._eps,
        }


class Mamba1(Scan):
    """Mamba 1.

    Its parameters: conv1d.weight [I, 1, L], conv1d.bias [I] if there is one, dt_proj.bias and D [I], A_log
    [I, N], and the weights of norms of steps, B and C if there are some. Rows of 2 * I become I.
    """

    _config: Mamba1Config

    def __init__(self, place: str, config: Mamba1Config, *, group: Group | None, **more: Any) -> None:
        """As `Scan`. `group`: the ranks that the channels are split over."""
        super().__init__(place, config, **more)
        self._group = group

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.state_width, self._config.head_width

    @cached_property
    def weights(self) -> Mamba1Weights:
        decays = -torch.exp(self.parameters["A_log"].float())  # [I, N]
        return Mamba1Weights(
            dt_bias=self.parameters["dt_proj.bias"].float(),
            decays=decays.view(-1, self._config.head_width, decays.shape[1]).transpose(1, 2).contiguous(),
            direct=self.parameters["D"].float(),
        )

    @cached_property
    def _norms(self) -> list[torch.Tensor]:
        """The weights of norms of steps [R], of B and of C [N]; empty: there are none."""
        if self._config.norms == "weighted":
            return [self.parameters[f"{name}_layernorm.weight"] for name in ("dt", "b", "c")]
        sizes = self._sizes if self._config.norms == "weightless" else []
        return [self._taps.new_ones(size) for size in sizes]

    @property
    def _sizes(self) -> list[int]:
        """The widths of steps before their projection, of B and of C."""
        return [self._config.rank, *[self._config.state_width] * 2]

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        assert context.states is not None
        slots, invariant = context.lora_slots, context.batch_invariant
        raw, gates = projected.chunk(2, dim=1)  # [T, I] each
        x = silu_conv(raw, self._taps, self.parameters.get("conv1d.bias"), states[0], context.states)
        mixed = self.within["x_proj"](x, slots, batch_invariant=invariant)
        if self._group is not None:
            mixed = self._group.sum(mixed)
        steps, *others = (part.contiguous() for part in torch.split(mixed, self._sizes, dim=1))
        if self._norms:
            steps, *others = (
                rms_norm(part, weight, self._config.norm_eps)
                for part, weight in zip((steps, *others), self._norms, strict=True)
            )
        steps = self.within["dt_proj"](steps, slots, batch_invariant=invariant)  # [T, I]
        rows = torch.cat((x, steps, gates, *others), dim=1)
        return mamba1(rows, self.weights, states[1], context.states)


class Mamba2(Scan):
    """Mamba 2.

    Its parameters: conv1d.weight [D, 1, L], conv1d.bias [D] if there is one, dt_bias, A_log and D [H], and
    norm.weight [I] if there is one. Rows of I + D + H become I.
    """

    _config: Mamba2Config

    def __init__(self, place: str, config: Mamba2Config, *, norm_group: Group | None, **more: Any) -> None:
        """As `Scan`. `norm_group`: the ranks over which normalised groups are split. None: they are not."""
        super().__init__(place, config, **more)
        self.norm_group = norm_group

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.state_width, self._config.head_width

    @cached_property
    def weights(self) -> Mamba2Weights:
        shared = self._shared_weights()
        if self.norm_group is not None:
            shared["norm"] = None  # `mix` normalises what the kernel returns
        return Mamba2Weights(
            bias=self.parameters.get("conv1d.bias"),
            direct=self.parameters["D"].float(),
            groups=self._config.groups,
            state_width=self._config.state_width,
            least_step=self._config.least_step,
            **shared,
        )

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        assert context.states is not None
        mixed = mamba2(projected, self.weights, states[0], states[1], context.states)
        if self.norm_group is not None:
            normalise_rows([(mixed, self.parameters["norm.weight"])], self.norm_group, self._eps)
        return mixed


class GatedDelta(Scan):
    """The gated delta rule.

    Its parameters: conv1d.weight [D, 1, L], dt_bias and A_log [H], and norm.weight [V]. Rows of I + D + 2 * H
    become I.
    """

    _config: GatedDeltaConfig

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.key_width, self._config.head_width

    @cached_property
    def weights(self) -> GatedDeltaWeights:
        sizes = self._config
        return GatedDeltaWeights(
            key_heads=sizes.key_heads,
            key_width=sizes.key_width,
            adjacent=1 if sizes.tiled else sizes.heads // sizes.key_heads,
            **self._shared_weights(),
        )

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        assert context.states is not None
        return gated_delta(projected, self.weights, states[0], states[1], context.states)


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay of each element of a key, and gates of few inputs.

    Its parameters: q_conv1d.weight, k_conv1d.weight and v_conv1d.weight [I, 1, L], dt_bias [I], A_log
    [1, 1, H, 1], and o_norm.weight [V]. Rows of 3 * I + 2 * V + H become I.
    """

    _decays, _norm = FORGET, "o_"

    def __init__(self, place: str, config: GatedDeltaConfig, *, heads: range, **more: Any) -> None:
        """As `Scan`. `heads`: this rank's heads. A_log has those of all ranks."""
        super().__init__(place, config, **more)
        self._own_decays = slice(heads.start, heads.stop)

    @property
    def _convolutions(self) -> Sequence[torch.Tensor]:
        return [self.parameters[f"{name}_conv1d.weight"] for name in "qkv"]

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        sizes, slots, invariant = self._config, context.lora_slots, context.batch_invariant
        widths = [sizes.convolved, *[sizes.head_width] * 2, sizes.heads]
        qkv, *narrow, betas = torch.split(projected, widths, dim=1)
        steps, gates = (
            self.within[name](part.contiguous(), slots, batch_invariant=invariant)
            for name, part in zip((f"{FORGET}f_b_proj", "g_b_proj"), narrow, strict=True)
        )
        return super().mix(torch.cat((gates, qkv, betas, steps), dim=1), states, context)


class SideBySide(Several):
    """mixer(x) + attention(x). In the last layer attention returns the wanted rows only, the mixer all."""

    def __init__(self, mixer: RecurrentMixer, attention: Attention) -> None:
        """Take ownership of the parts."""
        super().__init__(mixer, attention)
        self._mixer, self._attention = mixer, attention

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        mixed = self._mixer(x, context)
        if self._attention.is_last:
            mixed = mixed.index_select(0, context.inputs.wanted_rows)
        return mixed.add_(self._attention(x, context))
