"""Finds the pairs of tensors in the header of an adapter's file, and reads them.

PEFT has one A and one B for a parameter with the matrices of all experts: A is [E * r, I], with the ranks of
an expert next to each other; B is [O, r * E], in which experts alternate.

Dimension letters: r rank; I inputs; O outputs; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workers.adapters.config import MERGE, LoraSettings
from workers.adapters.errors import AdapterError, errors_of_file, quoted
from workers.adapters.targets import Targets
from workers.models.checkpoint import DTYPES, TensorEntry, name_of, read_header, read_parts
from workers.models.lora import Adaptable, BaseMatrix, ExpertStack, LoraPair
from workers.models.text_part import LEFT_OUT, RENAMED

WEIGHTS_FILE = "adapter_model.safetensors"

# A tensor needs some 200 bytes: enough for 20,000 tensors, or two of each module of the model.
_MAX_HEADER_BYTES, _HEADER_BYTES_OF_MODULE = 4 << 20, 512
_PREFIX = "base_model.model."
# (prefix in files, prefix in the model) for text parts, and for Mamba. The first match counts.
_RENAMED = (*RENAMED, ("backbone.", "model."))
# Optionally with the name of the adapter in memory, which PEFT accepts and other writers leave in.
_SUFFIXES = {f".lora_{part}{name}.weight": part for part in "AB" for name in ("", ".default")}
# A vector of DoRA, as PEFT saves it, has no suffix.
_MAGNITUDE = "magnitude"
_SUFFIXES |= {f".lora_magnitude_vector{end}": _MAGNITUDE for end in ("", ".weight", ".default.weight")}
# PEFT's suffixes of whole modules that are saved with the adapter.
_OF_WHOLE_MODULES = (".modules_to_save.default", ".modules_to_save", ".original_module", ".base_layer")
# PEFT wraps a module once for each adapted parameter; each wrapper but the last adds this to the name.
_WRAPPED = ".base_layer"
# Parts of names of tensors that are not plain LoRA, with descriptions for messages.
_OTHER_TENSORS = {
    "lora_embedding_": "an adapter of an embedding, which is not supported",
    "trainable_tokens": "an adapter of an embedding, which is not supported",
    "embed_tokens.": "a whole embedding that differs from the model's, which is not supported",
    "lm_head.": "a whole output layer that differs from the model's, which is not supported",
    ".bias": "a bias, which is not supported",
    "layernorm.": f"of a whole module, which is not supported: {MERGE}",
    "norm.": f"of a whole module, which is not supported: {MERGE}",
    "_proj.weight": f"of a whole module, which is not supported: {MERGE}",
}
_OTHER_MODULES = {
    "experts": "experts (on a GPU, or of a model without them)",
    "mlp.gate": "routers (on a GPU, or of a model without them)",
    "block_sparse_moe.gate": "routers (on a GPU, or of a model without them)",
    "embed_tokens": "embeddings",
    "lm_head": "the output layer",
}


@dataclass(slots=True)
class PairEntries:
    """The entries of a module's two tensors in a file.

    Attributes:
        name: The module or parameter in the file, without PEFT's prefix.
        shape: Its outputs and inputs.
        stack: The matrices of a parameter; None: it is a module.
        parts: The tensors "A" and "B", and for DoRA "magnitude".
    """

    name: str
    shape: tuple[int, int]
    stack: ExpertStack | None = None
    parts: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        """The number of matrices in a tensor."""
        return 1 if self.stack is None else len(self.stack.modules)

    @property
    def rank(self) -> int:
        """The rank, from the shape of A."""
        return self.parts["A"].shape[0] // self.experts

    @property
    def size_bytes(self) -> int:
        """The most bytes as float32: kernels pad ranks to multiples of 16, and larger ones of 32."""
        unit = 16 if self.rank <= 16 else 32
        return 4 * self.experts * -(-self.rank // unit) * unit * sum(self.shape)


def find_pairs(directory: Path, model: Adaptable, settings: LoraSettings) -> dict[str, PairEntries]:
    """The pairs in adapter_model.safetensors, by the name of the module or parameter in the model.

    Tensors of other parts of a multimodal model are left out, like its weights. So are the embedding and the
    output layer, which PEFT may save with an adapter, if they are equal to the model's.

    Args:
        directory: The adapter.
        model: The parts of the model that adapters may change.
        settings: The settings of the config.

    Raises:
        AdapterError: The file is not safetensors, or has a tensor that the model cannot have.
    """
    file = directory / WEIGHTS_FILE
    with errors_of_file(file):
        pairs: dict[str, PairEntries] = {}
        most = max(_MAX_HEADER_BYTES, _HEADER_BYTES_OF_MODULE * len(model.modules))
        for tensor, entry in sorted(read_header(file, most).items()):
            if _repeats(tensor, entry, model.base):
                continue
            name, part = _split(tensor)
            if name.startswith(LEFT_OUT):
                continue
            key, found = _place(name, model, settings.targets)
            pair = pairs.setdefault(key, found)
            if pair.name != found.name or part in pair.parts:
                raise AdapterError(f"tensor {quoted(tensor)}: is there twice, under different names")
            pair.parts[part] = entry
        for pair in pairs.values():
            _check_pair(pair, is_dora=settings.is_dora)
        if not pairs:
            raise AdapterError("has no tensor of a LoRA adapter")
        return pairs


def name_in_file(module: str, like: str) -> str:
    """The name of a model's module in a file in which another module is called `like`."""
    before, after = next((pair for pair in _RENAMED if like.startswith(pair[0])), ("", ""))
    return before + module.removeprefix(after)


def read_pairs(module: str, pair: PairEntries, scale: float) -> Iterator[tuple[str, LoraPair]]:
    """Read the tensors of a module, or of all modules of a parameter, as float32, B times `scale`.

    Raises AdapterError if the file cannot be read or has changed, or a value is not finite.
    """
    with errors_of_file(pair.parts["A"].file), torch.inference_mode():
        a, b = read_scaled(pair.parts["A"], 1.0), read_scaled(pair.parts["B"], scale)
        entry = pair.parts.get(_MAGNITUDE)
        magnitude = None if entry is None else read_scaled(entry, 1.0)
    if pair.stack is None:
        yield module, LoraPair(a, b, magnitude)
        return
    of_experts = b.view(len(b), -1, pair.experts).permute(2, 0, 1).contiguous()  # [E, O, r]
    for names, own_a, own_b in zip(pair.stack.modules, a.chunk(pair.experts), of_experts, strict=True):
        step, length = (len(names), 1) if pair.stack.interleaved else (1, len(own_b) // len(names))
        for index, name in enumerate(names):
            own = own_b[index::step] if step > 1 else own_b[index * length : (index + 1) * length]
            yield name, LoraPair(own_a, own)


def read_scaled(entry: TensorEntry, scale: float) -> torch.Tensor:
    """Read a tensor as float32, times `scale`. Raises ModelError, or AdapterError if it is not finite."""
    tensor = torch.empty(entry.shape, dtype=torch.float32)
    for first, part in read_parts(entry):
        # In float64, so that the product is rounded once.
        tensor[first : first + len(part)] = part if scale == 1.0 else part.double() * scale
    if not tensor.isfinite().all():
        times = "" if scale == 1.0 else f", times its scale of {scale:g},"
        raise AdapterError(f"tensor {quoted(entry.name)}{times} is not finite: train the adapter again")
    return tensor


def _repeats(tensor: str, entry: TensorEntry, base: Mapping[str, BaseMatrix]) -> bool:
    """Whether a tensor is a copy of the model's, which has no effect. Raises AdapterError."""
    name = tensor.removeprefix(_PREFIX).removesuffix(".weight")
    for whole in _OF_WHOLE_MODULES:
        name = name.removesuffix(whole)
    before, after = next((pair for pair in _RENAMED if name.startswith(pair[0])), ("", ""))
    matrix = base.get(f"{after}{name.removeprefix(before)}.weight")
    if matrix is None or entry.dtype not in DTYPES or entry.shape != matrix.shape:
        return False
    for first, part in read_parts(entry):
        ours = matrix.rows(range(first, first + len(part))).to(part.device)
        # One of the two may have been rounded to the dtype of the other.
        if not (torch.equal(part.to(ours.dtype), ours) or torch.equal(part, ours.to(part.dtype))):
            return False
    return True


def _split(tensor: str) -> tuple[str, str]:
    """Splits a tensor's name into the module's name in the file and the part. Raises AdapterError."""
    suffix = next((suffix for suffix in _SUFFIXES if tensor.endswith(suffix)), None)
    if suffix is None or not tensor.startswith(_PREFIX):
        kinds = (kind for part, kind in _OTHER_TENSORS.items() if part in tensor)
        kind = next(kinds, "no tensor of LoRA in PEFT's layout, such as base_model.model.x.lora_A.weight")
        raise AdapterError(f"tensor {quoted(tensor)}: is {kind}")
    return tensor.removeprefix(_PREFIX).removesuffix(suffix), _SUFFIXES[suffix]


def _place(name: str, model: Adaptable, targets: Targets) -> tuple[str, PairEntries]:
    """The model's module or parameter for a module of the file, with an empty pair.

    Raises AdapterError.
    """
    for before, after in (("", ""), *_RENAMED):
        renamed = after + name.removeprefix(before)
        if not name.startswith(before):
            continue
        if renamed in model.modules and not targets.has_parameter(f"{name}.weight"):
            return renamed, PairEntries(name, model.modules[renamed])
        parameter = _parameter(renamed, before, after, model.stacks, targets)
        if parameter is not None:
            stack = model.stacks[parameter]
            shapes = [model.modules[module] for module in stack.modules[0]]
            shape = sum(outputs for outputs, _ in shapes), shapes[0][1]
            return parameter, PairEntries(before + parameter.removeprefix(after), shape, stack)
    kind = next((kind for part, kind in _OTHER_MODULES.items() if part in name), None)
    if kind is not None:
        raise AdapterError(f"module {quoted(name)}: adapters of {kind} are not supported")
    raise AdapterError(
        f"module {quoted(name)}: the model has no such projection, or it cannot have an adapter: check that"
        " the adapter is for this model"
    )


def _parameter(
    name: str, before: str, after: str, stacks: Mapping[str, ExpertStack], targets: Targets
) -> str | None:
    """The parameter that PEFT adapts under a module's name in the model. None: the module has none.

    PEFT wraps several parameters of a module one after the other: the last one is outermost. Names begin with
    `before` in the file, and with `after` in the model. Raises AdapterError.
    """
    owner = name.removesuffix(_WRAPPED)
    own = [parameter for parameter in stacks if parameter.rpartition(".")[0] == owner]
    if not own:
        return None
    in_file = {parameter: before + parameter.removeprefix(after) for parameter in own}
    named = [parameter for parameter in own if targets.has_parameter(in_file[parameter])]
    # Other writers list parameters among the modules.
    named = named or [
        each for each in own if in_file[each] in targets or before + owner.removeprefix(after) in targets
    ]
    if len(named) <= name.endswith(_WRAPPED):
        raise AdapterError(
            f"target_parameters: module {quoted(name)} has tensors, but none of its parameters is named: PEFT"
            " would ignore them, so name it or remove them"
        )
    return named[-2 if name.endswith(_WRAPPED) else -1]


def _check_pair(pair: PairEntries, *, is_dora: bool) -> None:
    """Raises AdapterError unless it has an A [E * r, I] and a B [O, r * E] of a known dtype.

    With DoRA it must also have a vector [O].
    """
    outputs, inputs = pair.shape
    if is_dora != (_MAGNITUDE in pair.parts):
        has = "has no" if is_dora else "has a"
        raise AdapterError(f"use_dora: module {quoted(pair.name)} {has} lora_magnitude_vector")
    for part in "AB":
        if part not in pair.parts:
            raise AdapterError(
                f"module {quoted(pair.name)}: lora_{part}.weight is missing: save the adapter again"
            )
    for part, entry in pair.parts.items():
        if entry.dtype not in DTYPES:
            known = ", ".join(map(name_of, DTYPES.values()))
            raise AdapterError(
                f"tensor {quoted(entry.name)}: must be one of {known}, got {quoted(entry.dtype)}"
            )
        ranks = pair.parts["A"].shape[0] if pair.parts["A"].shape else 0
        wanted = {"A": (ranks, inputs), "B": (outputs, ranks), _MAGNITUDE: (outputs,)}[part]
        if entry.shape != wanted or not ranks or ranks % pair.experts:
            rank = "rank" if pair.stack is None else f"rank * {pair.experts}"
            asked = f"[{rank}, {inputs}]" if part == "A" else [*wanted]
            raise AdapterError(
                f"tensor {quoted(entry.name)}: has shape {list(entry.shape)}, but the model asks for {asked}:"
                " check that the adapter is for this model"
            )
