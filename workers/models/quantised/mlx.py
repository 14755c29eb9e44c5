"""MLX: rows of the matrix as a stream of bits.

weight uint32 [O, I * bits / 32], the first value in the lowest bits of the first word; a value of 3, 5 or 6
bits may begin in one word and end in the next. scales and biases [O, G]. A weight is scale * value + bias.
The matrices of all experts of a layer are one: weight [E, O, I * bits / 32], and so on. In MXFP4 there are no
biases, and scales are uint8; see `workers.models.quantised.mxfp4`.

Source: `dequantize` of mlx, `SwitchLinear` of mlx-lm. `_affine_dequantize_tensor` of transformers'
integrations/metal_quantization.py has the layouts of 2, 4 and 8 bits.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from kernels.dequantise import dequantised
from kernels.gguf_blocks import parts_of
from kernels.group_formats import FORMATS, GROUP_INPUTS
from workers.common.quantised.scheme import Layout, Scheme
from workers.models.checkpoint import DTYPES, Staging, StoredTensor, TensorEntry
from workers.models.errors import ModelError
from workers.models.latent_parts import PARTS_OF_LATENTS, with_merged_latents
from workers.models.parts import Part
from workers.models.quantised.matrix import IntegerRows, QuantisedMatrix, integer_format
from workers.models.quantised.mxfp4 import Mxfp4Matrix
from workers.models.quantised.tensors import SCALES, Tensors, read, read_scales, unpack_columns

# The second name is that of gemma4, the last that of gpt_oss, dots1 and afmoe.
_ALL_EXPERTS = re.compile(r"\.(switch_mlp|experts\.switch_glu|experts)\.(?=[a-z])")
_EXPERT = ".experts.{}."
_MAX_ELEMENTS = 4096
# The most matrices of experts and heads in a model. The description of one takes 1 KB. Kimi K2 has 76,928.
_MAX_MATRICES = 1 << 18
# Convolutions are [C, K, 1] instead of [C, 1, K]. Norms of some multiply by their weights, not by 1 + weight.
_WITH_OTHER_NORMS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_WITH_CONVOLUTIONS = _WITH_OTHER_NORMS | {
    "lfm2", "lfm2_moe", "mamba", "falcon_mamba", "mamba2", "jamba", "granitemoehybrid", "nemotron_h",
}  # fmt: skip
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
# The parts of `kv_b_proj`, each [H, O, I]; see `workers.models.latent_parts`.
_LATENTS = (".embed_q", ".unembed_out")
_WEIGHTS_OF_LATENTS = tuple(f"{module}.weight" for module in _LATENTS)
# The names of projections in these directories, and those in checkpoints of the library.
_NAMES = {
    "lfm2_moe": {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."},
    "nemotron_h": {".fc1.": ".up_proj.", ".fc2.": ".down_proj."},
}
_NORMS = tuple(
    f"{name}.weight"
    for name in (".input_layernorm", ".post_attention_layernorm", "model.norm", ".q_norm", ".k_norm")
)
# A word has eight 4-bit floats.
_WORDS_OF_GROUP = GROUP_INPUTS // 8
# Subtracted from 8-bit values by products, which multiply signed ones.
_MIDDLE = 128


class MlxMatrix(QuantisedMatrix):
    """A matrix in this layout."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        """Check the headers. Raises ModelError."""
        self._bits = scheme.bits
        self._words = tensors.need_matrix("weight", ("U32",))
        outputs, words = self._words.shape
        inputs, rest = divmod(32 * words, scheme.bits)
        if rest:
            says = f"has rows of {words} words, which are no values of {scheme.bits} bits"
            raise ModelError(f"{self._words.file}: tensor {self._words.name} {says}")
        groups = -(-inputs // (scheme.group or inputs))
        self._scales = tensors.need("scales", SCALES, (outputs, groups))
        self._minima = tensors.need("biases", (self._scales.dtype,), (outputs, groups))
        entries = [self._words, self._scales, self._minima]
        super().__init__(self._words.name, entries, (outputs, inputs))
        dtype = torch.float32 if scheme.bits == 8 else SCALES[self._scales.dtype]
        self._form = integer_format(scheme, self.name, inputs, dtype)

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        scales, minima = read_scales(self._scales), read_scales(self._minima)
        if self._bits == 8:
            # Exact if both are of similar size, as in files of mlx; else rounded to float32.
            scales, minima = scales.float(), minima.float() + _MIDDLE * scales.float()
        for rows in ranges:
            values, part = unpack_columns(read(self._words, rows), self._bits), slice(rows.start, rows.stop)
            if self._bits == 8:
                values = (values - _MIDDLE).view(torch.int8)
            yield rows.start, IntegerRows(values, scales[part], None, None, minima=minima[part])


def check_elements(entries: Mapping[str, TensorEntry]) -> None:
    """Raises ModelError for so many experts and heads that the descriptions of all would fill memory."""
    weights = [
        entry
        for name, entry in entries.items()
        if entry.dtype == "U32" and (_ALL_EXPERTS.search(name) or name.endswith(_WEIGHTS_OF_LATENTS))
    ]
    count = sum(entry.shape[0] for entry in weights if entry.shape)
    if count > _MAX_MATRICES:
        says = f"there are {count} matrices of experts and heads, and at most {_MAX_MATRICES} are read"
        raise ModelError(f"{weights[0].file}: {says}")


def split_experts(tensors: Tensors) -> Iterator[Tensors]:
    """Yields the tensors of each expert, by the names in other checkpoints; or those of another module.

    Raises ModelError unless all tensors have the same number of experts.
    """
    first = tensors.entries.get("weight")
    if _ALL_EXPERTS.search(tensors.module) is None or first is None or first.dtype != "U32":
        yield tensors
        return
    for expert, own in enumerate(_elements(tensors)):
        yield Tensors(_ALL_EXPERTS.sub(_EXPERT.format(expert), tensors.module), own)


def _elements(tensors: Tensors) -> Iterator[dict[str, TensorEntry]]:
    """Yields the tensors of each expert or head. Raises ModelError unless all have the same number."""
    first = tensors.need("weight", ("U32",))
    count = first.shape[0] if first.shape else 0
    for entry in tensors.entries.values():
        if entry.shape[:1] != (count,) or not 0 < count <= _MAX_ELEMENTS:
            says = f"which is not of 1 to {_MAX_ELEMENTS} matrices as {first.name}"
            raise ModelError(f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, {says}")
    for element in range(count):
        yield {part: entry.element(element) for part, entry in tensors.entries.items()}


class _MlxHeads(StoredTensor):
    """The matrices [O, I] of all heads as one tensor [H, O, I], dequantised."""

    dtype = "F32"

    def __init__(self, heads: Sequence[StoredTensor], group: int) -> None:
        """Take at least one matrix; all have the same shape. `group`: the inputs with one scale."""
        first = heads[0]
        self._heads, self._group = heads, group
        self.name, self.file, self.begin = first.name, first.file, first.begin
        self.shape = (len(heads), *first.shape)
        self.nbytes = 4 * math.prod(self.shape)

    def parts(
        self,
        rows: range | None = None,
        staging: Staging | None = None,  # noqa: ARG002 - parts are new tensors
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for head in range(len(self._heads)) if rows is None else rows:
            values = [self._values(part) for _, part in self._heads[head].parts()]
            yield head, torch.cat(values)[None]

    def samples(self) -> Iterator[bytes]:
        for head in self._heads:
            yield from head.samples()

    def _values(self, part: Part) -> torch.Tensor:
        if isinstance(part, torch.Tensor):  # in the format of GGUF
            form = FORMATS[self._heads[0].dtype]
            return dequantised(form, parts_of(form.name, part, self.shape[2]))
        return part.dense(self._group)


def mlx_matrix(tensors: Tensors, scheme: Scheme) -> StoredTensor:
    """A matrix, or those of all heads. Raises ModelError."""
    make = MlxMatrix if scheme.layout is Layout.MLX else _mlx_floats
    if not tensors.module.endswith(_LATENTS):
        return make(tensors, scheme)
    return _MlxHeads([make(Tensors(tensors.module, own), scheme) for own in _elements(tensors)], scheme.group)


def _mlx_floats(tensors: Tensors, _: Scheme) -> Mxfp4Matrix:
    """A matrix in MXFP4. Raises ModelError."""
    words = tensors.need_matrix("weight", ("U32",))
    outputs, count = words.shape
    groups, rest = divmod(count, _WORDS_OF_GROUP)
    if rest:
        says = f"has rows of {count} words, which are no groups of {GROUP_INPUTS} inputs"
        raise ModelError(f"{words.file}: tensor {words.name} {says}")
    scales = tensors.need("scales", ("U8",), (outputs, groups))
    shape = (outputs, groups, GROUP_INPUTS // 2)
    return Mxfp4Matrix(words.name, dataclasses.replace(words, dtype="U8", shape=shape), scales)


class _LessOne(StoredTensor):
    """The weights of a norm minus 1, as in the library's checkpoints: exact in float32."""

    dtype = "F32"

    def __init__(self, entry: TensorEntry) -> None:
        self._entry, self.name, self.file = entry, entry.name, entry.file
        self.shape, self.begin, self.nbytes = entry.shape, entry.begin, entry.nbytes

    def parts(
        self,
        rows: range | None = None,
        staging: Staging | None = None,  # noqa: ARG002 - parts are new tensors
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for first, part in self._entry.parts(rows):
            yield first, part.float() - 1

    def samples(self) -> Iterator[bytes]:
        return self._entry.samples()


def mlx_to_library_layout(tensors: Mapping[str, StoredTensor], model_type: object) -> dict[str, StoredTensor]:
    """Reverts the other changes that mlx-lm makes to the tensors of a checkpoint when it reads it.

    Other model types with a changed convolution are refused by its shape.

    Source: `sanitize` of the files of these types in mlx_lm/models.

    Raises ModelError if two tensors get the same name.
    """
    parts = (f".{part}.weight" for part in PARTS_OF_LATENTS)
    found = with_merged_latents(_renamed(tensors, dict(zip(_WEIGHTS_OF_LATENTS, parts, strict=True))))
    if model_type not in _WITH_CONVOLUTIONS:
        return found
    found = _renamed(found, _NAMES.get(str(model_type), {}))
    for name, entry in list(found.items()):
        if not isinstance(entry, TensorEntry) or entry.dtype not in DTYPES:
            continue
        if name.endswith(_CONVOLUTIONS) and entry.shape[2:] == (1,):
            outputs, width, _ = entry.shape
            found[name] = dataclasses.replace(entry, shape=(outputs, 1, width))
        elif name.endswith(_NORMS) and len(entry.shape) == 1 and model_type in _WITH_OTHER_NORMS:
            found[name] = _LessOne(entry)
    return found


def _renamed(tensors: Mapping[str, StoredTensor], names: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors with parts of their names replaced. Raises ModelError if two get the same name."""
    found: dict[str, StoredTensor] = {}
    for name, entry in tensors.items():
        new = name
        for before, after in names.items():
            new = new.replace(before, after)
        if new in found:
            raise ModelError(f"{entry.file}: tensor {entry.name} is also there as {found[new].name}")
        found[new] = entry
    return found
