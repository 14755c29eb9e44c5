"""Finds the quantised matrices among the tensors of a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from workers.common.quantised.methods import BITSANDBYTES, MXFP4
from workers.common.quantised.scheme import Layout, Quantisation, Scheme
from workers.models.checkpoint import StoredTensor, TensorEntry
from workers.models.errors import ModelError
from workers.models.quantised.bitsandbytes import bitsandbytes_tensors
from workers.models.quantised.compressed import CompressedMatrix
from workers.models.quantised.float8 import Float8Matrix
from workers.models.quantised.gptq import AwqMatrix, GptqMatrix
from workers.models.quantised.mlx import check_elements, mlx_matrix, split_experts
from workers.models.quantised.mxfp4 import mxfp4_tensors
from workers.models.quantised.tensors import FLOAT8, Tensors

_READERS: Mapping[Layout, Callable[[Tensors, Scheme], StoredTensor]] = {
    Layout.GPTQ: GptqMatrix,
    Layout.AWQ: AwqMatrix,
    Layout.PACKED: CompressedMatrix,
    Layout.BYTES: CompressedMatrix,
    Layout.FLOAT8: Float8Matrix,
    Layout.MLX: mlx_matrix,
    Layout.MLX_FLOATS: mlx_matrix,
}
# Names that only quantised matrices have.
_MARKS = ("qweight", "weight_packed")
_QUANTISED_DTYPES = ("I8", "U32", *FLOAT8)
_PARTS = frozenset((
    "qweight", "qzeros", "scales", "biases", "g_idx", "bias",
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point",
    "weight_g_idx",
))  # fmt: skip
# Scales of activations, keys and values, which are rounded here by other rules, or not at all.
_UNUSED = frozenset((
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale",
    "input_scale_ub", "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale",
))  # fmt: skip
_EMBEDDING, _EMBEDDING_KIND, _KIND = "embed_tokens", "Embedding", "Linear"


def quantised_tensors(entries: Mapping[str, TensorEntry], said: Quantisation) -> dict[str, StoredTensor]:
    """The tensors of a model, by the names that they have in unquantised checkpoints.

    Args:
        entries: The tensors of the files, by their names there.
        said: The quantisation in the config.

    Raises:
        ModelError: A matrix does not have the tensors that the config implies, two tensors have the same
            name there, or there are too many experts.
    """
    if said.method == MXFP4:
        return mxfp4_tensors(entries)
    if said.method == BITSANDBYTES:
        return bitsandbytes_tensors(entries, said)
    check_elements(entries)
    found: dict[str, StoredTensor] = {}
    for name, entry in _named(entries, said):
        if name in found:
            raise ModelError(f"{entry.file}: tensor {entry.name} is also there as {found[name].name}")
        found[name] = entry
    return found


def _named(entries: Mapping[str, TensorEntry], said: Quantisation) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors with their names in unquantised checkpoints. Raises ModelError."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = entry
    for module, parts in modules.items():
        is_quantised = _is_quantised(parts)
        if is_quantised:
            own = {part: entry for part, entry in parts.items() if part in _PARTS}
            scheme = _scheme(Tensors(module, own), said)
            for each in split_experts(Tensors(module, own)):
                yield f"{each.module}.weight", _READERS[scheme.layout](each, scheme)
                if "bias" in each.entries:
                    yield f"{each.module}.bias", each.entries["bias"]
        for part, entry in parts.items():
            if part not in _UNUSED and not (is_quantised and part in _PARTS):
                yield f"{module}.{part}" if module else part, entry


def _is_quantised(parts: Mapping[str, TensorEntry]) -> bool:
    weight = parts.get("weight")
    return any(mark in parts for mark in _MARKS) or (weight is not None and weight.dtype in _QUANTISED_DTYPES)


def _scheme(tensors: Tensors, said: Quantisation) -> Scheme:
    """The scheme of a module's matrix. Raises ModelError."""
    module = tensors.module
    kind = _EMBEDDING_KIND if module.rpartition(".")[2] == _EMBEDDING else _KIND
    any_entry = next(iter(tensors.entries.values()))
    scheme = said.scheme(module, kind)
    if scheme is None:
        says = f"{any_entry.name} is quantised, and the config says that {module} is not"
        raise ModelError(f"{any_entry.file}: tensor {says}")
    return scheme
