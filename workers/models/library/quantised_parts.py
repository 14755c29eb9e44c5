"""Parts of a library's model that keep quantised weights of files, without loss and without a dense copy.

These are projections, embeddings and experts whose tensors in the files are those of one module. Other
quantised tensors are dequantised when the library places them; see `file_tensors`.

Dimension letters: T tokens; C hidden width; I intermediate width of an expert; E experts; k experts of a
token.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels.experts import experts, pack_experts
from kernels.gated_activation import Activation
from kernels.grouped_weight import AnyGroupedWeight
from kernels.stacked_weight import StackedWeight
from kernels.weight import Weight
from kernels.weight_formats import WeightFormat, new_weight, unrounded
from workers.huge_pages import Pieces
from workers.models.checkpoint import StoredTensor, check_finite
from workers.models.library.packed_linear import PackedEmbedding, PackedLinear, hold, values_are_there
from workers.models.linear import LoadTarget
from workers.models.parts import Part
from workers.models.shard import Slice

_WEIGHT, _STACKED = ".weight", (".gate_up_proj", ".down_proj")
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# MiniMax M2 has the last three, and its checkpoints have the experts in a module that the library renames.
_PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_RENAMED = (".block_sparse_moe.", ".mlp.")
# Activations by the class of the library's module.
_ACTIVATIONS: Mapping[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}


class QuantisedParts:
    """The quantised parts of one model.

    Attributes:
        targets: The target of each tensor, by its name. Empty before the model is built.
        nbytes: Their memory in bytes.
    """

    def __init__(
        self,
        entries: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        rounds_rows: bool = True,
    ) -> None:
        """`dtype`: the dtype of activations. `device`: "cpu"; or "meta", without memory.

        `rounds_rows`: see `workers.models.weights.LoadPlan`.
        """
        self._rounds_rows = rounds_rows
        self._forms = {name: entry.form for name, entry in entries.items() if entry.form is not None}
        self._shapes = {name: entry.shape for name, entry in entries.items()}
        self._dtype, self._device, self._pieces = dtype, torch.device(device), Pieces(device)
        self.targets: dict[str, LoadTarget | _Stacked] = {}

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets.values())

    def in_models_of(self, model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """A subclass whose models have these parts instead of dense ones as soon as they are made."""
        if not self._forms:
            return model_class
        parts = self

        def made(self: Any, *arguments: Any, **settings: Any) -> None:
            model_class.__init__(self, *arguments, **settings)
            parts._put_into(self)

        # The library reads the class's name and module; and a model may have no parameters but these parts.
        members = {
            "__init__": made,
            "__module__": model_class.__module__,
            "dtype": property(lambda _: self._dtype),
            "device": property(lambda _: self._device),
        }
        return type(model_class.__name__, (model_class,), members)

    def fill(self, entries: Mapping[str, StoredTensor], done: Callable[[int], None]) -> None:
        """Read the tensors. Calls `done` with the bytes of each part. Raises ModelError."""
        for name, target in self.targets.items():
            entry = entries[name]
            for first, part in entry.parts():
                for written in target.fill_quantised(part, first):
                    check_finite(written, f"{entry.file}: tensor {entry.name}")
                done(part.nbytes)

    def pack(self, module: nn.Module) -> None:
        """Pack filled experts for kernels. Mutates the model. `targets` must not be used afterwards."""
        self.targets = {}
        values_are_there(module)
        for part in module.modules():
            if isinstance(part, QuantisedExperts):
                part.gate_up, part.down = pack_experts(part.gate_up), pack_experts(part.down)

    def _put_into(self, module: Any) -> None:
        self.targets = {}
        with self._device:  # instead of the device on which the library makes its models
            self._put_projections(module)
            self._put_experts(module)
            self._put_stacked_experts(module)

    def _put_projections(self, module: Any) -> None:
        ties: dict[str, str] = module.all_tied_weights_keys
        for name in [name for name in self._forms if name.endswith(_WEIGHT)]:
            shared = [name, *(target for target, source in ties.items() if source == name)]
            parts = [_part(module, each) for each in shared]
            if all(_holds(part, self._shapes[name]) for part in parts):
                hold(parts, self._matrix([name]))
                for part in parts:
                    part.awaits_values = True
                    # Otherwise the library draws weights for it. One that scales rows needs its own buffers.
                    part._is_hf_initialized = type(part) in (PackedLinear, PackedEmbedding)  # noqa: SLF001
                # Tied modules share the weight already, and have no parameters.
                module.all_tied_weights_keys = ties = {
                    target: source for target, source in ties.items() if source != name
                }
                module._tied_weights_keys = ties  # noqa: SLF001 - of the library

    def _put_experts(self, module: Any) -> None:
        found: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
        for name in self._forms:
            match = _OF_EXPERT.fullmatch(name)
            if match is not None and match[3] in _PROJECTIONS:
                place = match[1] if _part(module, match[1]) else match[1].replace(*_RENAMED)
                found[place][int(match[2]), _PROJECTIONS[match[3]]] = name
        for place, names in found.items():
            replaced = _part(module, place + _WEIGHT)
            activation = _ACTIVATIONS.get(type(getattr(replaced, "act_fn", None)).__name__)
            if activation is not None and self._are_experts(names, replaced):
                count = 1 + max(index for index, _ in names)
                gate_up = [self._matrix([names[index, "gate"], names[index, "up"]]) for index in range(count)]
                down = [self._matrix([names[index, "down"]]) for index in range(count)]
                module.set_submodule(place, QuantisedExperts(gate_up, down, activation))

    def _put_stacked_experts(self, module: Any) -> None:
        """Replaces experts for which a tensor has the matrices of all."""
        for name in [name for name in self._forms if name.endswith(_STACKED[0])]:
            place = name.removesuffix(_STACKED[0])
            names = [place + ending for ending in _STACKED]
            replaced = _part(module, place + _WEIGHT)
            activation = _ACTIVATIONS.get(type(getattr(replaced, "act_fn", None)).__name__)
            shapes = [tuple(getattr(replaced, ending[1:], torch.empty(0)).shape) for ending in _STACKED]
            if activation is None or [self._shapes.get(each) for each in names] != shapes:
                continue
            if not all(each in self._forms for each in names):
                continue
            gate_up, down = (
                [self._new(self._forms[each], outputs, inputs) for _ in range(count)]
                for each, (count, outputs, inputs) in zip(names, shapes, strict=True)
            )
            self.targets |= {names[0]: _Stacked(gate_up), names[1]: _Stacked(down)}
            module.set_submodule(place, QuantisedExperts(gate_up, down, activation))

    def _are_experts(self, names: Mapping[tuple[int, str], str], replaced: Any) -> bool:
        """Whether these matrices are all matrices of a module of the library."""
        gate_up, down = (getattr(replaced, name, None) for name in ("gate_up_proj", "down_proj"))
        if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
            return False
        (count, both, width), (_, _, inner) = gate_up.shape, down.shape
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        wanted = {(index, kind): shape for index in range(count) for kind, shape in shapes.items()}
        return both == 2 * inner and {key: self._shapes[name] for key, name in names.items()} == wanted

    def _matrix(self, names: Sequence[str]) -> Weight:
        """A weight with the rows of some tensors, one after the other."""
        forms = [self._forms[name] for name in names]
        rows = [self._shapes[name][0] for name in names]
        inputs = self._shapes[names[0]][1]
        if len({*forms}) == 1:
            weight: Weight = self._new(forms[0], sum(rows), inputs)
        else:
            weight = StackedWeight(
                [self._new(form, each, inputs) for form, each in zip(forms, rows, strict=True)]
            )
        first = 0
        for name, count in zip(names, rows, strict=True):
            into, at = weight.part(first)
            whole = Slice.whole(count, inputs)
            self.targets[name] = LoadTarget(into, (count, inputs), taken=whole, first=at)
            first += count
        return weight

    def _new(self, form: WeightFormat, outputs: int, inputs: int) -> Weight:
        held = form if self._rounds_rows else unrounded(form)
        assert held is not None
        return new_weight(held, outputs, inputs, range(inputs), self._dtype, self._pieces.empty)


class _Stacked:
    """The target of a tensor with the matrices of all experts, like a `LoadTarget`."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = [each for each in weights if isinstance(each, AnyGroupedWeight)]
        assert len(self._weights) == len(weights), "of GGUF files"
        self.shape = (len(weights), *weights[0].shape)
        self.nbytes = sum(weight.nbytes for weight in weights)

    def fill_quantised(self, part: Part, first: int) -> list[torch.Tensor]:
        """`part`: the bytes of experts from `first` on."""
        assert isinstance(part, torch.Tensor)
        weights = self._weights[first : first + len(part)]
        return [
            weight.write_blocks(0, blocks.view(len(weight), -1))
            for weight, blocks in zip(weights, part, strict=True)
        ]


class QuantisedExperts(nn.Module):
    """Replaces the library's experts of a layer."""

    def __init__(self, gate_up: Sequence[Weight], down: Sequence[Weight], activation: Activation) -> None:
        """Take ownership of E weights [2 * I, C] and E weights [C, I]."""
        super().__init__()
        self.gate_up: Any = gate_up
        self.down: Any = down
        self._activation = activation

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, C], experts [T, k] and their weights [T, k] -> [T, C]."""
        return experts(x, self.gate_up, self.down, chosen, weights, self._activation)


def _part(module: nn.Module, name: str) -> Any:
    """The module that has a tensor of this name. None: there is none."""
    try:
        return module.get_submodule(name.removesuffix(_WEIGHT))
    except AttributeError:
        return None


def _holds(part: Any, shape: tuple[int, ...]) -> bool:
    """Whether a module is a projection or embedding of this shape, which can hold a quantised matrix."""
    if type(part) is not nn.Linear and not isinstance(part, nn.Embedding):
        return False
    return isinstance(part._parameters.get("weight"), nn.Parameter) and tuple(part.weight.shape) == shape  # noqa: SLF001
