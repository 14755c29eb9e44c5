"""The tensors of a GGUF file, by the names and in the order of rows that a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workers.common.gguf.header import Header, TensorInfo
from workers.common.gguf.settings import EMBEDDING, FACTORS, HEAD, Architecture
from workers.models.checkpoint import Staging, StoredTensor, TensorEntry, read_parts
from workers.models.errors import ModelError
from workers.models.files import FileVersion
from workers.models.registry import SANDWICH_NORMS, ExpertNames, family_of

# Spellings of a checkpoint. Those of quantised types are the names of formats.
_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_GLOBAL = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WITH_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SINKS = "attn_sinks"
_OF_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", _SINKS: "self_attn"}
# Dimensions of the tensors of all experts.
_STACKED = {"weight": 3, "bias": 2}
_INTERLEAVED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a file, and the file's version when it was read."""

    path: Path
    version: FileVersion
    content: Header


@dataclass(frozen=True)
class GgufTensor(TensorEntry):
    """A tensor of a file, which differs from that of a checkpoint.

    Attributes:
        head_rows: The rows of a head, in which those of a pair are beside each other. In a checkpoint all
            first ones come before all second ones. 0: the order is a checkpoint's.
        offset: What its values have more than a checkpoint's.
    """

    head_rows: int = 0
    offset: float = 0.0

    def parts(
        self, rows: range | None = None, staging: Staging | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `StoredTensor`: whole heads, in the order of a checkpoint."""
        for first, part in read_parts(self, rows, staging, self.head_rows or 1):
            # In place: the memory may be what a GPU copies from.
            if self.head_rows:
                pairs = part.view(-1, self.head_rows // 2, 2, *part.shape[1:])
                part.copy_(pairs.transpose(1, 2).reshape(part.shape))
            if self.offset:
                part.sub_(self.offset)
            yield first, part


def stored_tensors(
    headers: list[FileHeader], architecture: Architecture, settings: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """The tensors of all files of a model, by their names in a checkpoint.

    A tensor that is not known has its own name, and is refused with that.

    Args:
        headers: Those of the files.
        architecture: That of the model.
        settings: Its config.

    Raises:
        ModelError: Two files have the same tensor, or one has a shape that cannot be.
    """
    names = _Names(settings)
    head_rows = settings["head_dim"] if architecture.interleaved else 0
    assert isinstance(head_rows, int)
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for info in header.content.tensors.values():
            if info.name in FACTORS:
                continue
            changes = _changes(header, info, architecture, head_rows)
            for name, entry in names.entries(header, info):
                if name in found:
                    raise ModelError(f"{header.path}: tensor {info.name} is there twice")
                found[name] = replace(entry, **changes)
    return found


def _changes(
    header: FileHeader, info: TensorInfo, architecture: Architecture, head_rows: int
) -> dict[str, Any]:
    """What differs from a checkpoint's tensor: fields of `GgufTensor`. Raises ModelError."""
    part = _module(info.name)
    if head_rows and part in _INTERLEAVED:
        if head_rows < 2 or head_rows % 2 or not info.shape or info.shape[0] % head_rows:
            raise ModelError(
                f"{header.path}: tensor {info.name} must have rows for whole heads of {head_rows}"
            )
        return {"head_rows": head_rows}
    if architecture.norm_offset and len(info.shape) == 1 and is_norm(info.name):
        if info.type not in _DTYPES:
            raise ModelError(f"{header.path}: tensor {info.name} must be f32, got {info.type}")
        return {"offset": architecture.norm_offset}
    return {}


def written_name(name: str, architecture: Architecture) -> str:
    """The name in a file of a tensor of a checkpoint, without experts. A name that is not known stays."""
    for ours, theirs in _GLOBAL.items():
        if name == theirs:
            return ours
    parts = _Names({"model_type": architecture.model_type}).parts
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    module, _, kind = part.rpartition(".")
    found = next((ours for ours, theirs in parts.items() if theirs == module), module)
    return f"blk.{layer}.{found}.{kind}"


def is_interleaved(name: str, architecture: Architecture) -> bool:
    """Whether a file has the rows of a tensor of a checkpoint in another order; see `GgufTensor`."""
    return architecture.interleaved and _module(written_name(name, architecture)) in _INTERLEAVED


def is_norm(name: str) -> bool:
    """Whether a tensor has the weights of a norm, by its name."""
    return _module(name).endswith("norm")


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


class _Names:
    """The names of tensors in checkpoints of a family."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        family = family_of(settings["model_type"])
        self.parts = dict(_IN_LAYER)
        if family.norms == SANDWICH_NORMS:
            self.parts |= _WITH_NORMS_AFTER
        if family.sinks:
            self.parts |= _OF_GPT_OSS
        if family.mlp_names == ("gate_up_proj",):
            self.parts["ffn_up"] = "mlp.gate_up_proj"
        self._experts: dict[str, str] = {}
        self._num_experts = settings.get("num_experts", settings.get("num_local_experts"))
        if family.experts is not None:
            self.parts["ffn_gate_inp"] = family.experts.router
            self._experts = _expert_parts(family.experts)

    def entries(self, header: FileHeader, info: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
        """A tensor, or one for each expert, by their names in a checkpoint.

        Raises ModelError for those of another number of experts, before they are made.
        """
        entry = GgufTensor(
            info.name, header.path, _DTYPES.get(info.type, info.type), info.shape, info.begin, info.nbytes,
            header.version,
        )  # fmt: skip
        part, _, kind = info.name.rpartition(".")
        block, _, part = part.rpartition(".")
        layer = block.removeprefix("blk.")
        if not (block.startswith("blk.") and layer.isascii() and layer.isdigit()):
            yield _GLOBAL.get(info.name, info.name), entry
        elif part in self._experts and len(info.shape) == _STACKED.get(kind):
            count, size = info.shape[0], info.nbytes // info.shape[0]
            if count != self._num_experts:
                says = f"{count} experts, and the metadata say {self._num_experts!r}"
                raise ModelError(f"{header.path}: tensor {info.name} is of {says}")
            for index in range(count):
                begin = info.begin + index * size
                name = f"model.layers.{layer}.{self._experts[part].format(index)}.{kind}"
                yield name, replace(entry, shape=info.shape[1:], begin=begin, nbytes=size)
        else:
            known, kind = self.parts.get(part), "sinks" if part == _SINKS else kind
            yield info.name if known is None else f"model.layers.{layer}.{known}.{kind}", entry


def _expert_parts(names: ExpertNames) -> dict[str, str]:
    return {"ffn_gate_exps": names.gate, "ffn_up_exps": names.up, "ffn_down_exps": names.down}


def read_vector(header: FileHeader, info: TensorInfo, most: int) -> list[float]:
    """A vector of float32. Raises ModelError if it is something else, or longer than `most`."""
    if info.type != "f32" or len(info.shape) != 1 or info.shape[0] > most:
        raise ModelError(f"{header.path}: tensor {info.name} must be a vector of at most {most} float32")
    entry = TensorEntry(
        info.name, header.path, _DTYPES[info.type], info.shape, info.begin, info.nbytes, header.version
    )
    return [value for _, part in entry.parts() for value in part.tolist()]
