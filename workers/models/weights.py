"""Loads a Hugging Face directory into a decoder.

The headers of the files are compared with the config, and what is needed with what is free, before anything
is allocated. Parameters are allocated once, in the asked dtype and already fused, and filled part by part: a
load needs the memory of the weights and of one part of a tensor, never the weights twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.linear import can_pack
from workers.kv.sizing import available_bytes, check_weights_fit
from workers.models import checkpoint
from workers.models.builder import build_decoder
from workers.models.checkpoint import AUTO, Entry
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.errors import ModelError
from workers.models.linear import Target
from workers.models.registry import WRAPPERS

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the files, after every part; the last call has both equal."""

# In some checkpoints, and computed here: not an error, not loaded.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        decoder: The model.
        config: Its config.
        fingerprint: 32 hexadecimal digits that tell models apart: of the config and of the weights as they
            are in the files, whatever the dtype loaded and however they are sharded.
        num_parameters: Numbers in the checkpoint that the model uses; tied ones count once.
        weight_bytes: Bytes of the parameters in memory.
    """

    decoder: Decoder
    config: ModelConfig
    fingerprint: str
    num_parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What will be loaded: the headers of the files fit the config, and there is room for the weights.

    Attributes:
        config: Of the model.
        dtype: Of the parameters.
        device: Where they go.
        entries: The tensors of the files, by their names in a model of text alone.
        num_parameters: See `LoadedModel`.
        weight_bytes: See `LoadedModel`.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    entries: Mapping[str, Entry]
    num_parameters: int
    weight_bytes: int


def load_model(
    directory: Path | str,
    dtype: torch.dtype | str = AUTO,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    *,
    pack: bool = False,
) -> LoadedModel:
    """Load config.json and the safetensors of a directory: see `plan_load` and `load_planned`."""
    return load_planned(plan_load(directory, dtype, device), progress, pack=pack)


def plan_load(
    directory: Path | str, dtype: torch.dtype | str = AUTO, device: torch.device | str = "cpu"
) -> LoadPlan:
    """Look at a directory without reading its weights.

    Args:
        directory: A Hugging Face model directory.
        dtype: A torch dtype or its name (float32, bfloat16, float16); "auto": the one the config names, else
            that of the embedding in the files.
        device: Where the parameters go.

    Raises:
        ModelError: The directory does not hold a model that is supported and whole; the message names the
            file and the setting or tensor.
        KvSizingError: The weights do not fit into memory.
    """
    directory, device = Path(directory), torch.device(device)
    config = ModelConfig.from_directory(directory)
    entries = _of_text(checkpoint.read_entries(directory), config)
    stored = entries[_EMBEDDING].dtype if _EMBEDDING in entries else None
    chosen = checkpoint.choose_dtype(dtype, config.dtype, stored)
    _check_number_of_experts(config, directory, entries)
    targets = build_decoder(config, chosen, "meta").targets()
    _check_entries(config, directory, targets, entries)
    _check_tied_head(config, entries)
    weight_bytes = sum(target.tensor.nbytes for target in targets.values())
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    check_weights_fit(str(directory), weight_bytes, free_bytes)
    num_parameters = sum(math.prod(target.shape) for target in targets.values())
    return LoadPlan(config, chosen, device, entries, num_parameters, weight_bytes)


def load_planned(plan: LoadPlan, progress: Progress | None = None, *, pack: bool = False) -> LoadedModel:
    """Load what was planned.

    Args:
        plan: What.
        progress: Told how far the load is.
        pack: Lay the weights out for the matrix library, where that is faster; see `Decoder.pack`.

    Raises:
        ModelError: A tensor cannot be read, or holds what is not a finite number.
    """
    decoder = build_decoder(plan.config, plan.dtype, plan.device)
    _load_weights(decoder, plan.entries, progress)
    # The config as parsed: two spellings of one model have one fingerprint.
    digest = checkpoint.fingerprint(plan.entries, repr(plan.config))
    if pack:
        decoder.pack(_embedding_in_file(decoder, plan.entries[_EMBEDDING]))
    return LoadedModel(decoder, plan.config, digest, plan.num_parameters, plan.weight_bytes)


@torch.inference_mode()
def _load_weights(decoder: Decoder, entries: Mapping[str, Entry], progress: Progress | None) -> None:
    """Fill the parameters of a decoder from entries that were found to fit.

    Raises:
        ModelError: A tensor cannot be read, or holds what is not a finite number.
    """
    targets = decoder.targets()
    total_bytes = sum(entries[name].nbytes for name in targets)
    done_bytes = 0
    # In the order of the files, so that a disk reads forwards.
    for name in sorted(targets, key=lambda name: (entries[name].file.name, entries[name].begin)):
        target, entry = targets[name], entries[name]
        for first, part in checkpoint.read_parts(entry):
            # A part of a tensor that is repeated, such as a norm of all heads, is all of it.
            whole = part.dim() != target.tensor.dim()
            filled = target.fill(part, None if whole else first)
            done_bytes += part.nbytes
            del part  # it maps the file
            checkpoint.check_finite(filled, f"{entry.file}: tensor {entry.name}")
            if progress is not None:
                progress(done_bytes, total_bytes)


def _of_text(entries: Mapping[str, Entry], config: ModelConfig) -> dict[str, Entry]:
    """The tensors of the text part, by the names that they have in a model of text alone.

    Raises ModelError for two that would have one name.
    """
    if config.wrapper is None:
        return dict(entries)
    wrapper = WRAPPERS[config.wrapper]
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        if not name.startswith(wrapper.left_out):
            before, after = next((pair for pair in wrapper.renamed if name.startswith(pair[0])), ("", ""))
            renamed = after + name.removeprefix(before)
            if renamed in found:
                raise ModelError(f"{entry.file}: tensor {name} is also there as {found[renamed].name}")
            found[renamed] = entry
    return found


def _embedding_in_file(decoder: Decoder, entry: Entry) -> torch.Tensor | None:
    """The embedding as it lies in the file, if it can be used from there."""
    usable = can_pack(decoder.embedding) and checkpoint.DTYPES[entry.dtype] is decoder.dtype
    # A tensor of the format need not lie on a multiple of its element size.
    return checkpoint.map_tensor(entry) if usable and entry.begin % decoder.dtype.itemsize == 0 else None


def _check_number_of_experts(config: ModelConfig, directory: Path, entries: Mapping[str, Entry]) -> None:
    """Raises ModelError for more experts than there are tensors, before a target is made for each."""
    count = config.experts.count if config.experts is not None else 0
    experts = count * sum(layer.sparse for layer in config.layers)
    if experts > len(entries):
        raise ModelError(
            f"{directory}: the config asks for {experts} experts, the files hold {len(entries)} tensors"
        )


def _check_tied_head(config: ModelConfig, entries: Mapping[str, Entry]) -> None:
    """Raises ModelError for a head that is not the embedding, where the config says that the two are one.

    The library would take the head of the file, against the config.
    """
    head, embedding = entries.get(_HEAD), entries[_EMBEDDING]
    if head is None or not config.tie_word_embeddings:
        return
    # Of one shape and dtype, they come in the same parts. NaN, which differs from itself, is found later.
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for (_, one), (_, other) in zip(
            checkpoint.read_parts(head), checkpoint.read_parts(embedding), strict=True
        )
    )
    if not same:
        raise ModelError(
            f"{head.file}: tensor {_HEAD} differs from {_EMBEDDING}, and tie_word_embeddings says that they"
            " are one"
        )


def _check_entries(
    config: ModelConfig, directory: Path, targets: Mapping[str, Target], entries: Mapping[str, Entry]
) -> None:
    """Check that a checkpoint has exactly the tensors that are needed. Raises ModelError."""
    for name, target in targets.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"{directory}: tensor {name} is missing")
        if entry.shape != target.shape:
            shapes = f"shape {list(entry.shape)}, the config asks for {list(target.shape)}"
            raise ModelError(f"{entry.file}: tensor {name} has {shapes}")
        if entry.dtype not in checkpoint.DTYPES:
            known = ", ".join(checkpoint.DTYPES)
            raise ModelError(f"{entry.file}: tensor {name} must be one of {known}, got {entry.dtype}")
    for name, entry in entries.items():
        # A tied checkpoint may repeat the embedding as its head; the config says they are one.
        tied_head = name == _HEAD and config.tie_word_embeddings
        if name not in targets and not tied_head and not name.endswith(_COMPUTED_SUFFIX):
            # Ignoring, say, a bias would run another model than the one in the files.
            raise ModelError(f"{entry.file}: tensor {name} is not part of this {config.model_type} model")
