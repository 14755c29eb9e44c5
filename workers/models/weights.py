"""Loads a Hugging Face directory into a decoder.

Parameters are allocated once, in the asked dtype and already fused, and filled part by part: a load needs the
memory of the weights and of one part of a tensor, never the weights twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.linear import can_pack
from workers.models import checkpoint
from workers.models.checkpoint import Entry
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, Target
from workers.models.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the files, after every part; the last call has both equal."""

AUTO = "auto"

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


def load_model(
    directory: Path | str,
    dtype: torch.dtype | str = AUTO,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    *,
    pack: bool = False,
) -> LoadedModel:
    """Load config.json and the safetensors of a directory.

    Args:
        directory: A Hugging Face model directory.
        dtype: A torch dtype or its name (float32, bfloat16, float16); "auto": the one the config names, else
            that of the embedding in the files.
        device: Where the parameters go.
        progress: Told how far the load is.
        pack: Lay the weights out for the matrix library, where that is faster; see `Decoder.pack`.

    Raises:
        ModelError: The directory does not hold a model that is supported and whole; the message names the
            file and the setting or tensor.
    """
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    entries = checkpoint.read_entries(directory)
    chosen = _choose_dtype(dtype, config, entries)
    decoder = Decoder.from_config(config, chosen, device)
    load_weights(decoder, directory, entries, progress)
    # The config as parsed: two spellings of one model have one fingerprint.
    digest = checkpoint.fingerprint(entries, repr(config))
    targets = decoder.targets().values()
    num_parameters = sum(math.prod(target.shape) for target in targets)
    weight_bytes = sum(target.tensor.nbytes for target in targets)
    if pack:
        # They keep the plain parameters alive, which are to go one by one.
        del targets
        decoder.pack(_embedding_in_file(decoder, entries[_EMBEDDING]))
    return LoadedModel(decoder, config, digest, num_parameters, weight_bytes)


@torch.inference_mode()
def load_weights(
    decoder: Decoder, directory: Path, entries: Mapping[str, Entry], progress: Progress | None = None
) -> None:
    """Fill the parameters of a decoder. Everything is checked before the first byte is copied.

    Mutates the parameters of `decoder`.

    Args:
        decoder: An allocated decoder.
        directory: Where the entries come from, for messages.
        entries: The tensors of the checkpoint.
        progress: Told how far the load is.

    Raises:
        ModelError: A tensor is missing, unknown, of another shape than the config asks for, of a dtype that
            is not supported, or cannot be read.
    """
    targets = decoder.targets()
    _check_entries(decoder.config, directory, targets, entries)
    total_bytes = sum(entries[name].nbytes for name in targets)
    done_bytes = 0
    # In the order of the files, so that a disk reads forwards.
    for name in sorted(targets, key=lambda name: (entries[name].file.name, entries[name].begin)):
        target, entry = targets[name].tensor, entries[name]
        for first, part in checkpoint.read_parts(entry):
            if part.shape == target.shape or part.dim() != target.dim():
                target.copy_(part)
            else:
                target[first : first + part.shape[0]].copy_(part)
            done_bytes += part.nbytes
            del part  # it maps the file
            if progress is not None:
                progress(done_bytes, total_bytes)


def _embedding_in_file(decoder: Decoder, entry: Entry) -> torch.Tensor | None:
    """The embedding as it lies in the file, if it can be used from there."""
    usable = can_pack(decoder.embedding) and checkpoint.DTYPES[entry.dtype] is decoder.dtype
    # A tensor of the format need not lie on a multiple of its element size.
    return checkpoint.map_tensor(entry) if usable and entry.begin % decoder.dtype.itemsize == 0 else None


def _choose_dtype(dtype: torch.dtype | str, config: ModelConfig, entries: Mapping[str, Entry]) -> torch.dtype:
    """The dtype to load in. Raises ModelError."""
    allowed = {str(known).removeprefix("torch."): known for known in checkpoint.DTYPES.values()}
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    elif dtype != AUTO:
        name = dtype
    elif config.dtype is not None:
        name = config.dtype
    else:
        embedding = entries.get("model.embed_tokens.weight")
        stored = checkpoint.DTYPES.get(embedding.dtype) if embedding is not None else None
        name = str(stored).removeprefix("torch.") if stored is not None else "float32"
    if name not in allowed:
        raise ModelError(f"dtype: must be {AUTO} or one of {', '.join(sorted(allowed))}, got {name!r}")
    return allowed[name]


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
