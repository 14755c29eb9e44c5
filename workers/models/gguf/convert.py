"""Writes a model as a GGUF file with quantised weights, as `quantization` quantises them at load.

The file has a temporary name until it is complete, so that a part is never taken for a model. Its disk space
is reserved first. Then the header is written, read back and compared with the model, before any weight is
read. The peak of memory is a part of a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

import torch

from kernels.gguf_blocks import blocks_of
from kernels.group_formats import GroupFormat
from kernels.grouped_weight import GroupedWeight
from kernels.quantisers import quantise
from kernels.rope import RopeSpec, rope_frequencies
from workers.common.gguf import GgufError
from workers.common.gguf.architectures import ARCHITECTURES, POOLING
from workers.common.gguf.header import Value
from workers.common.gguf.writer import NewTensor, padded, written_header
from workers.models.builder import build_decoder
from workers.models.checkpoint import AUTO, PART_BYTES, StoredTensor, check_finite
from workers.models.config import ModelConfig
from workers.models.errors import ModelError, UnsupportedError
from workers.models.files import unchanged_settings
from workers.models.gguf.metadata import architecture_for, end_metadata, model_metadata, rope_factors
from workers.models.gguf.names import names_of
from workers.models.gguf.reordered import in_order_of_files
from workers.models.gguf.source import GgufSource
from workers.models.gguf.tensors import has_decays, is_interleaved, is_norm, written_shape
from workers.models.gguf.tokenizer import POOLINGS
from workers.models.gguf.vocabulary import text_metadata
from workers.models.linear import LoadTarget
from workers.models.rope_settings import longest_text
from workers.models.source import ModelSource, source_of
from workers.models.text import ModelText
from workers.models.tokenizer import MAX_BYTES
from workers.models.weights import LoadPlan, Progress, plan_load

# Values of `llama_ftype`, the format of most tensors; and the version of the formats.
_FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k": 14, "q4_k_m": 15}
_FORMATS_VERSION = 2
# Settings that a file does not have, or has in another form.
_NOT_COMPARED = ("model_type", "dtype", "wrapper", "layers", "eos_token_ids", "bos_token_id", "gguf_layout")
# The relative error of numbers, which are float32 in files.
_ERROR = 2.0**-22


def convert(model: Path, out: Path, quantization: str, progress: Progress | None = None) -> int:
    """Write a model as a GGUF file. Returns its size in bytes.

    Args:
        model: A model directory, or another `ModelSource`.
        out: The file, which must not exist.
        quantization: A name of `workers.models.recipes`.
        progress: Called with the progress; see `Progress`.

    Raises:
        ModelError: The model is incomplete or not supported, or GGUF cannot represent it; these are found
            before a weight is read. Or a weight is not finite.
        OSError: The file cannot be written, as on a full disk.
    """
    _check_not_there(out)
    with unchanged_settings(model):
        plan = _as_in_files(plan_load(model, AUTO, "cpu", quantization=quantization, in_memory=False))
        source = source_of(model)
        text = source.text(plan.config.vocab_size, MAX_BYTES)
        with _errors_naming(model):
            new = _NewFile(plan, _metadata(plan, text, source))
    with _temporary(out) as (file, path):
        new.begin(file)
        with _errors_naming(model, path):
            _check_same(GgufSource(path, [path]), plan, text, new.shapes)
        new.write_weights(file, progress)
    return new.nbytes


def _as_in_files(plan: LoadPlan) -> LoadPlan:
    """The plan of the same model with GGUF's layout."""
    config = dataclasses.replace(plan.config, gguf_layout=True)
    decoder = build_decoder(config, plan.dtype, "meta")
    return dataclasses.replace(plan, config=config, entries=in_order_of_files(plan.entries, decoder))


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of a GGUF file: a tensor of a checkpoint, or those of all experts of a layer.

    Attributes:
        names: The names of its tensors in a checkpoint.
        new: Its entry in the header.
        form: Its quantised format. None: it is not quantised.
    """

    names: tuple[str, ...]
    new: NewTensor
    form: GroupFormat | None


class _NewFile:
    """A file to be written: the rotary factors, then the tensors of a checkpoint.

    Attributes:
        nbytes: Its size.
        shapes: The shapes of the tensors of a checkpoint, by name.
    """

    def __init__(self, plan: LoadPlan, metadata: Mapping[str, Value]) -> None:
        """Raises GgufError if GGUF cannot represent the model."""
        self._plan = plan
        self._architecture = ARCHITECTURES[architecture_for(plan.config)]
        self._factors = rope_factors(plan.config)
        targets = build_decoder(plan.config, plan.dtype, "meta", formats=plan.formats).targets()
        self.shapes = {name: target.shape for name, target in targets.items()}
        self._tensors = [*_written(plan, targets)]
        of_factors = [NewTensor(name, tuple(one.shape), "f32") for name, one in self._factors.items()]
        tensors = [*of_factors, *(tensor.new for tensor in self._tensors)]
        self._header = written_header(metadata, tensors)
        self.nbytes = len(self._header) + sum(padded(tensor.nbytes) for tensor in tensors)

    def begin(self, file: BufferedRandom) -> None:
        """Reserve the disk space, and write everything but the weights. Raises OSError."""
        os.posix_fallocate(file.fileno(), 0, self.nbytes)
        file.write(self._header)
        for factors in self._factors.values():
            _fill_up(file, _write(file, factors))
        file.flush()

    def write_weights(self, file: BufferedRandom, progress: Progress | None) -> None:
        """Write the weights. Raises OSError, and ModelError for one that is not finite or cannot be read."""
        total_bytes, done_bytes = sum(self._plan.entries[name].nbytes for name in self.shapes), 0
        for tensor in self._tensors:
            written = 0
            for entry in (self._plan.entries[name] for name in tensor.names):
                for rows in self._rows(tensor.new.name, entry):
                    written += _write(file, _values(rows, tensor.form, f"{entry.file}: tensor {entry.name}"))
                    done_bytes += rows.nbytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)
            _fill_up(file, written)

    def _rows(self, name: str, entry: StoredTensor) -> Iterator[torch.Tensor]:
        """Yields a tensor in parts, with GGUF's order of rows and values. Raises ModelError."""
        if is_interleaved(name, self._architecture):
            yield from _interleaved(entry, self._plan.config.head_dim)
            return
        for _, rows in entry.parts():
            assert isinstance(rows, torch.Tensor), "what is quantised is not converted"
            if is_norm(name):
                yield rows.float() + self._architecture.norm_offset
            else:
                yield -rows.float().exp() if has_decays(name) else rows


def _written(plan: LoadPlan, targets: Mapping[str, LoadTarget]) -> Iterator[_Written]:
    """The tensors of a GGUF file, made of those of a checkpoint."""
    config, family = plan.config, plan.config.family
    # If no layer has experts, the names of shared experts are those of the MLP.
    names = names_of(family if config.experts else dataclasses.replace(family, experts=None))
    grouped: dict[str, list[str]] = {}
    for name in targets:
        grouped.setdefault(names.in_file(name), []).append(name)
    for name, all_names in grouped.items():
        first = targets[all_names[0]]
        form = first.into.form if isinstance(first.into, GroupedWeight) else None
        shape = written_shape(name, first.shape, config.recurrent)
        if names.are_of_experts(name):
            shape = len(all_names), *shape
        yield _Written((*all_names,), NewTensor(name, shape, form.name if form else "f32"), form)


def _interleaved(entry: StoredTensor, head_rows: int) -> Iterator[torch.Tensor]:
    """Yields a tensor in parts of whole heads, with rows of rotated pairs interleaved. Raises ModelError."""
    count = entry.shape[0]
    step = max(1, PART_BYTES * count // (entry.nbytes * head_rows)) * head_rows
    for first in range(0, count, step):
        wanted = range(first, min(first + step, count))
        rows = torch.cat([part.clone() for _, part in entry.parts(wanted) if isinstance(part, torch.Tensor)])
        halves = rows.view(-1, 2, head_rows // 2, *rows.shape[1:])
        yield halves.transpose(1, 2).reshape(rows.shape)


def _metadata(plan: LoadPlan, text: ModelText, source: ModelSource) -> dict[str, Value]:
    """The metadata of the file. Raises GgufError and UnsupportedError."""
    config, quantization = plan.config, plan.quantization
    assert quantization is not None
    longest = longest_text(source.settings(), config.max_position_embeddings)
    ends = end_metadata(_ends(config, text), config.bos_token_id)
    general: dict[str, Value] = {
        "general.file_type": _FILE_TYPES[quantization],
        "general.quantization_version": _FORMATS_VERSION,
    }
    architecture = architecture_for(config)
    of_model = model_metadata(config, source.path.name, longest) | _pooling(text.pooling, architecture)
    return of_model | general | text_metadata(text, config.vocab_size, ends, architecture)


def _pooling(pooling: str, architecture: str) -> dict[str, Value]:
    """The metadata for a pooling. Raises UnsupportedError for one that GGUF cannot represent."""
    if not pooling:
        return {}
    number = next((each for each, name in POOLINGS.items() if name == pooling), None)
    if number is None:
        raise UnsupportedError(f"modules.json: files of GGUF cannot say {pooling}")
    return {f"{architecture}.{POOLING}": number}


def _ends(config: ModelConfig, text: ModelText) -> tuple[int, ...]:
    """The end tokens. The tokenizer's comes first."""
    own = () if text.end_id is None else (text.end_id,)
    return (*dict.fromkeys((*own, *config.eos_token_ids)),)


def _check_same(
    written: GgufSource, plan: LoadPlan, text: ModelText, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises UnsupportedError unless the written file describes the same model, and ModelError."""
    found = ModelConfig.from_settings(written.settings())
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(plan.config, field.name), getattr(found, field.name)
        if field.name not in _NOT_COMPARED and not _is_same(ours, theirs):
            raise UnsupportedError(f"{field.name}: files of GGUF cannot say {ours!r}")
    for index, (ours, theirs) in enumerate(zip(plan.config.layers, found.layers, strict=True)):
        if ours.window != theirs.window:
            raise UnsupportedError(
                f"sliding_window: files of GGUF cannot say {ours.window} for layer {index}"
            )
        if dataclasses.replace(ours, rope=None) != dataclasses.replace(theirs, rope=None):
            raise UnsupportedError(f"files of GGUF cannot say what layer {index} is")
        if not _is_same_rope(ours.rope, theirs.rope, plan.config.rotary_dim):
            raise UnsupportedError(f"rope_parameters: files of GGUF cannot say {ours.rope}")
    if not {*_ends(plan.config, text)} <= {*found.eos_token_ids}:
        raise UnsupportedError(f"eos_token_id: files of GGUF cannot say {plan.config.eos_token_ids}")
    if {name: entry.shape for name, entry in written.tensors().items()} != dict(shapes):
        raise UnsupportedError("its tensors are not those of a file")
    if written.text(found.vocab_size, MAX_BYTES).chat_template.sources != text.chat_template.sources:
        raise UnsupportedError("chat_template: files of GGUF cannot say it")


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=_ERROR)
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        names = [field.name for field in dataclasses.fields(ours)]
        return all(_is_same(getattr(ours, name), getattr(theirs, name)) for name in names)
    return ours == theirs


def _is_same_rope(ours: RopeSpec | None, theirs: RopeSpec | None, rotary_dim: int) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    (one, factor), (other, other_factor) = (rope_frequencies(rope, rotary_dim) for rope in (ours, theirs))
    return torch.allclose(one, other, rtol=_ERROR, atol=0) and _is_same(factor, other_factor)


@contextmanager
def _errors_naming(model: Path, written: Path | None = None) -> Iterator[None]:
    """Inside the block, GGUF errors, and those about the written file, name the model instead."""
    try:
        yield
    except (GgufError, ModelError) as error:
        why = str(error).removeprefix(f"{written}: ")
        raise UnsupportedError(f"{model}: cannot be written as GGUF: {why}") from None


def _check_not_there(out: Path) -> None:
    if os.path.lexists(out):
        raise ModelError(f"{out}: is there already")


@contextmanager
def _temporary(out: Path) -> Iterator[tuple[BufferedRandom, Path]]:
    """A temporary file that gets its final name when the block ends, and is removed if the block fails.

    Raises OSError, and ModelError if a file of that name exists by then.
    """
    path = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with path.open("x+b") as file:
            yield file, path
            file.flush()
            os.fsync(file.fileno())
        _check_not_there(out)  # it may have been created meanwhile
        path.rename(out)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _values(rows: torch.Tensor, form: GroupFormat | None, where: str) -> torch.Tensor:
    """Rows in the file's format. Raises ModelError, which begins with `where`, if they are not finite."""
    if form is None:
        check_finite(values := rows.float(), where)
        return values
    parts = quantise(rows, form)
    # These are finite if the rows are.
    for factors in (parts.scales, parts.minima):
        if factors is not None:
            check_finite(factors, where)
    return blocks_of(form.name, parts)


def _write(file: BufferedRandom, values: torch.Tensor) -> int:
    """Returns the bytes. Raises OSError."""
    return file.write(values.contiguous().view(torch.uint8).numpy().data)


def _fill_up(file: BufferedRandom, written: int) -> None:
    file.write(bytes(padded(written) - written))
