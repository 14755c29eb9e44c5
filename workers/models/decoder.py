"""A decoder-only model as a stack of layers over the paged KV cache. `builder` composes it.

Does not know families, sequences, scheduling or sampling.

Dimension letters: T tokens of the batch; R wanted rows; C hidden width; V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.cpu.sublayers import Memory
from kernels.linear import DenseWeight, linear
from kernels.packed_pages import can_pack_width, packed_width
from kernels.rope import RopeSpec, rope_table
from kernels.softcap import divide, softcap
from kernels.weight import Weight
from workers.kv.state_tensors import StateShape
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.adapted import Adapted, Layer
from workers.models.capture import RowCapture, routing_of
from workers.models.compiled_layers import Stage, compiled
from workers.models.config import ModelConfig
from workers.models.few_rows import FewRows, TilesOfPlaces, device_ms
from workers.models.inputs import ForwardInputs
from workers.models.layers import ForwardContext, Norm, Sublayer, parts_of
from workers.models.linear import LoadTarget
from workers.models.mtp_head import MtpHead
from workers.models.recurrent_inputs import state_rows, with_tokens_before
from workers.models.recurrent_layers import RecurrentMixer
from workers.models.shard import Shard, Slice
from workers.models.steering import SteeredRows, SteeredStage


@dataclass(frozen=True, slots=True)
class CapturedStage:
    """A `Stage` that begins with a layer, counted from 0. Captures the hidden states before it.

    Attributes:
        selects: Whether rows are all rows of the batch, from which the wanted ones are selected.
    """

    stage: Stage
    capture: RowCapture
    layer: int
    selects: bool

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext, /
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        # The output of the previous layer is residual + x; x is not added yet.
        parts = (residual,) if x is None else (residual, x)
        if self.selects:
            self.capture.capture_rows(self.layer, context.inputs.wanted_rows, *parts)
        else:
            self.capture.capture_last(self.layer, sum(parts[1:], parts[0]))
        return self.stage(x, residual, context)


class Decoder(Adapted):
    """A decoder-only model. `workers.models.weights` fills its parameters."""

    has_hidden_states = True
    packs_kv = True

    def __init__(
        self,
        config: ModelConfig,
        embedding: Weight,
        layers: Sequence[Layer],
        final_norm: Norm,
        lm_head: Weight,
        shard: Shard,
        mtp_head: MtpHead | None = None,
    ) -> None:
        """Take ownership of parameters, all of one dtype and device.

        Args:
            config: The model.
            embedding: [V, C], where V is `shard.vocabulary_rows`.
            layers: All layers, in order.
            final_norm: The norm before the head.
            lm_head: [V, C]; the same object as `embedding` if the two are tied.
            shard: The part of the model that the parameters are.
            mtp_head: The MTP head that it drafts with; None: it does not.
        """
        super().__init__()
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding
        self.layers = list(layers)
        self.mtp_head = mtp_head
        self.lm_head = lm_head
        # On a GPU the caller may set this. On the CPU it cannot be chosen: `pack` sets it.
        self.batch_invariant = False
        self._final_norm = final_norm
        self._shard = shard
        width = packed_width(config.head_dim, self.dtype, self.device)
        of_layer = LayerKv(len(shard.kv_heads), width, width)
        if config.latent is not None:
            of_layer = LayerKv(1, width, config.latent.latent, in_keys=True)
        self.state_shapes = self._number_states()
        # A recurrent state belongs to a single text, so there is none for each branch of a tree.
        self.takes_trees = not self.state_shapes
        self.graphable = mtp_head is None
        self.kv_layers = (of_layer,) * sum(layer.attention for layer in config.layers)
        self._ropes = tuple(config.ropes)
        self.rotation_bytes = len(self._ropes) * config.rotary_dim * torch.float32.itemsize
        # Packed models run several sublayers in one call; on a GPU, operations on few rows are fused.
        of_all_rows, of_wanted_rows = self._parted()
        self._of_all_rows: Sequence[Stage] = of_all_rows
        self._of_wanted_rows: Sequence[Stage] = of_wanted_rows
        # The layers that begin, and that end, with a sublayer of this number.
        ends = [*itertools.accumulate(map(len, self.layers))]
        self._begins = {begin: index for index, begin in enumerate([0, *ends[:-1]])}
        self._ends = {end - 1: index for index, end in enumerate(ends)}
        # How products of few rows are computed on a GPU.
        self.tiles: TilesOfPlaces | None = None
        if self.device.type == "cuda":
            self.fuse_few_rows(TilesOfPlaces(device_ms))
        self._rope_tables: dict[RopeSpec, torch.Tensor] = {}  # each [positions of the pages in use, R]
        # Families that scale by the square root of the width round the factor to the model's dtype.
        self._embedding_scale = config.embedding_scale
        if config.family.scales_embeddings:
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def _number_states(self) -> tuple[StateShape, ...]:
        """The shapes of all recurrent states. Tells each part of the model which of them it has."""
        found: tuple[StateShape, ...] = ()
        for body in (part for sublayer in self._sublayers() for part in parts_of(sublayer.body)):
            if isinstance(body, RecurrentMixer):
                body.states = range(len(found), len(found) + len(body.state_shapes))
                found += body.state_shapes
        if self.mtp_head is not None:
            self.mtp_head.state = len(found)
            found += (self.mtp_head.state_shape,)
        return found

    def targets(self) -> dict[str, LoadTarget]:
        """The target of each tensor of a Hugging Face checkpoint, by the tensor's name.

        The targets cover every element of every parameter once. Writing to a target changes the model.
        """
        found = {"model.embed_tokens.weight": self._of_vocabulary(self.embedding)}
        found.update(self._final_norm.targets("model."))
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = self._of_vocabulary(self.lm_head)
        for index, layer in enumerate(self.layers):
            for sublayer in layer:
                found.update(sublayer.targets(f"model.layers.{index}."))
        if self.mtp_head is not None:
            found.update(self.mtp_head.targets(f"model.layers.{len(self.layers)}."))
        return found

    def _of_vocabulary(self, matrix: Weight) -> LoadTarget:
        shape, rows = (self.config.vocab_size, self.config.hidden_size), self._shard.vocabulary
        return LoadTarget(matrix, shape, taken=Slice(shape, (rows,), range(shape[1])))

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack the filled parameters in place. Do not use `targets` afterwards."""
        tied = self.lm_head is self.embedding
        self.lm_head = self.lm_head.packed()
        if tied:
            self.embedding = self.lm_head
        for sublayer in self._sublayers():
            sublayer.body.pack()
        if self.mtp_head is not None:
            self.mtp_head.pack()
        self._compile()
        is_packed = self.lm_head.compiled is not None
        # Heads of other widths are normalised, and may be attended to, in torch.
        self.batch_invariant = is_packed and can_pack_width(self.config.head_dim)

    @torch.inference_mode()
    def renew(self) -> None:
        """Recompute data derived from the parameters, after these were written through `targets`."""
        for sublayer in self._sublayers():
            sublayer.body.renew()

    @torch.inference_mode()
    def use_float32_head(self) -> bool:
        """Compute logits in float32 from now on, after `pack`. False: not on a GPU, nor in a group."""
        if self.device.type != "cpu" or self._shard.group is not None:
            return False
        self.lm_head = DenseWeight(self.lm_head.dense().float()).packed()
        return True

    def fuse_few_rows(self, tiles: TilesOfPlaces) -> None:
        """Run steps of few rows with fewer launches, where that is faster. See `workers.models.few_rows`."""
        self.tiles = tiles
        self._of_all_rows, self._of_wanted_rows = ([FewRows(each, tiles)] for each in self._parted())

    def _compile(self) -> None:
        """Combine sublayers into compiled calls, where that is possible on the CPU."""
        if self.device.type == "cuda":
            return
        memory = Memory()
        self._of_all_rows, self._of_wanted_rows = (
            compiled(each, self._ropes, memory) for each in self._parted()
        )

    def _sublayers(self) -> list[Sublayer]:
        """The sublayers of all layers, in order."""
        return [sublayer for layer in self.layers for sublayer in layer]

    def _parted(self) -> tuple[list[Sublayer], list[Sublayer]]:
        """The sublayers up to the last one that reads other rows, which returns wanted rows; and the rest.

        With an MTP head all sublayers compute all rows.
        """
        every = self._sublayers()
        reading = sum(len(layer) for layer in self.layers[: self.config.last_mixer]) + 1
        return every[:reading], every[reading:]

    @torch.inference_mode()
    def forward(  # noqa: C901 - each call would be one for each token
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        """Run the batch through all layers.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots. Fills `capture`.

        Args:
            inputs: The batch. Positions must be below `max_position_embeddings` and the number of slots of
                `kv`, tokens below `vocab_size`.
            kv: Pages of this model's shape and dtype.
            capture: What to keep of the layers; None: nothing.

        Returns:
            [R, C] the hidden rows of `inputs.wanted_rows` after the final norm, in that order.
        """
        states = None
        if self.state_shapes:
            inputs = with_tokens_before(inputs)
            states = inputs.state_rows or state_rows(inputs)
        residual = self._embedded(inputs)
        rotations = self._rotations(inputs.positions, kv)
        routing = last_routing = steered = None
        if inputs.experts is not None or capture is not None:
            rows = len(inputs.token_ids)
            routing, last_routing = routing_of(inputs.experts, inputs.wanted_rows, capture, rows)
        context = ForwardContext(inputs, kv, rotations, self.batch_invariant, routing=routing, states=states)
        if inputs.lora_slots is not None:
            context = self._with_slots(context, inputs.lora_slots)
            steered = self._steering.rows(inputs.lora_slots)
        of_all_rows, of_wanted_rows = self._of_all_rows, self._of_wanted_rows
        if steered is not None or capture is not None:
            of_all_rows, of_wanted_rows = self._stages(steered, inputs.wanted_rows, capture)
        x: torch.Tensor | None = None
        for stage in of_all_rows:
            x, residual = stage(x, residual, context)
        if self.mtp_head is not None:
            hidden = self._hidden_with_head(self.mtp_head, x, residual, context)
            if capture is not None:
                capture.capture_last(len(self.layers), hidden)
            return hidden
        # The last attention, or the layer in its place, has returned only the wanted rows.
        residual = residual.index_select(0, inputs.wanted_rows)  # [R, C]
        if not len(residual):
            return residual
        if inputs.lora_slots is not None or routing is not None:
            context = replace(context, lora_slots=context.wanted_lora_slots, routing=last_routing)
        for stage in of_wanted_rows:
            x, residual = stage(x, residual, context)
        hidden = self._final_norm(residual) if x is None else self._final_norm.of_sum(x, residual)  # [R, C]
        if capture is not None:
            capture.capture_last(len(self.layers), hidden)
        return hidden

    def _embedded(self, inputs: ForwardInputs) -> torch.Tensor:
        embedded = self._shard.embedded(inputs.token_ids, self.embedding.rows)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def _hidden_with_head(
        self, head: MtpHead, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The hidden rows of the wanted rows. Writes the MTP head's keys, values and states of all rows."""
        hidden = self._final_norm(residual) if x is None else self._final_norm.of_sum(x, residual)  # [T, C]
        head.write(self._embedded(context.inputs), hidden, context)
        return hidden.index_select(0, context.inputs.wanted_rows)

    @torch.inference_mode()
    def draft(
        self, inputs: ForwardInputs, before: torch.Tensor, kv: KvTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MTP head's logits of the token after one token of each item.

        Mutates `kv`: writes the head's keys and values.

        Args:
            inputs: One token of each item. All rows are wanted.
            before: [N, C] the hidden rows of the previous tokens from `forward`, or the second result of
                `draft` for these.
            kv: As for `forward`.

        Returns:
            The logits [N, V], and [N, C], which is `before` of the next tokens.
        """
        assert self.mtp_head is not None
        context = ForwardContext(inputs, kv, self._rotations(inputs.positions, kv), self.batch_invariant)
        rows, after = self.mtp_head(self._embedded(inputs), before, context)
        return self.logits(rows), after

    def _stages(
        self, steered: SteeredRows | None, wanted_rows: torch.Tensor, capture: RowCapture | None
    ) -> tuple[Sequence[Stage], Sequence[Stage]]:
        """The stages on all rows and on the wanted rows, for a forward with steering or a capture.

        These need access between sublayers, which may otherwise be compiled as one.
        """
        captures = capture is not None and bool(capture.rows)
        if steered is None and not captures:
            return self._of_all_rows, self._of_wanted_rows
        stages: list[Stage] = [*self._sublayers()]
        of_all_rows = len(self._parted()[0])  # the last of which returns the wanted rows
        if steered is None and len(stages) == of_all_rows + 1:  # no layer begins with the last MLP
            stages[of_all_rows:] = self._of_wanted_rows
        if steered is not None:
            of_wanted = steered.of(wanted_rows)
            for index, layer in self._ends.items():
                rows = steered if index < of_all_rows - (self.mtp_head is None) else of_wanted
                stages[index] = SteeredStage(stages[index], rows, layer)
        if capture is not None and captures:
            for index, layer in self._begins.items():
                stages[index] = CapturedStage(stages[index], capture, layer, selects=index < of_all_rows)
        return stages[:of_all_rows], stages[of_all_rows:]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden rows.

        Args:
            hidden: [R, C] from `forward`.

        Returns:
            [R, V] in the head's dtype, owned by the caller. Only meaningful on rank 0.
        """
        logits = linear(hidden.to(self.lm_head.dtype), self.lm_head, batch_invariant=self.batch_invariant)
        logits = self._shard.logits(logits, self.config.vocab_size)
        if self.config.logits_divisor != 1.0:
            logits = divide(logits, self.config.logits_divisor)
        cap = self.config.logits_softcap
        return logits if cap is None else softcap(logits, cap)

    def _rotations(self, positions: torch.Tensor, kv: KvTensors) -> dict[RopeSpec, torch.Tensor]:
        """Cosines and sines [T, R] of each rotary embedding at the positions of the tokens."""
        return {rope: self._rope_table(rope, kv).index_select(0, positions) for rope in self._ropes}

    def _rope_table(self, rope: RopeSpec, kv: KvTensors) -> torch.Tensor:
        """Rotations of all positions that fit into the pages, computed at the first forward over them."""
        positions = min(self.config.max_position_embeddings, kv.num_pages * kv.page_size)
        table = self._rope_tables.get(rope)
        if table is None or len(table) < positions:
            table = rope_table(rope, self.config.rotary_dim, positions, self.device)
            self._rope_tables[rope] = table
        return table
