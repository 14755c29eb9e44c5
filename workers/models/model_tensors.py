"""The tensors in the files of a model: their names in a text model, and whether they are what it is made of.

Only headers are read, but for what a checkpoint may have beside the model's own tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from workers.models import checkpoint
from workers.models.builder import build_decoder
from workers.models.checkpoint import StoredTensor
from workers.models.config import ModelConfig
from workers.models.errors import ModelError, UnsupportedError
from workers.models.linear import LoadTarget
from workers.models.pooling import makes_embeddings
from workers.models.source import ModelSource, source_of
from workers.models.stacked_experts import separated
from workers.models.text_part import of_text_model

_log = logging.getLogger(__name__)

# The names of all tensors but the head's begin with the first. In checkpoints of a base model they begin with
# one of the others, or with the name of the family's last norm.
_PREFIX, _IN_BASE_MODELS = "model.", ("embed_tokens.", "embeddings.", "layers.")
# Some checkpoints have these tensors. They are computed here instead of loaded.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
# AutoGPTQ writes a bias for each projection: zeros if the model has none.
_BIAS_SUFFIX = ".bias"
_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_MATRIX = 2
# Tensors that an MTP head shares with the model. Some checkpoints have them twice.
_OF_MODEL_IN_MTP_HEAD = (".embed_tokens.weight", ".shared_head.head.weight")


def tensors_of(source: ModelSource, config: ModelConfig) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """The tensors of the text part, by their names in a text model; and the config that fits them.

    An embedding model may have no head, like base models. Then its embedding is used as the head, which does
    not affect vectors.
    """
    entries = _of_text(source.tensors(), config)
    if _HEAD not in entries and makes_embeddings(source.path):
        config = dataclasses.replace(config, tie_word_embeddings=True)
    return config, entries


def check_names(directory: Path, config: ModelConfig) -> None:
    """Compare the names of the tensors with those that native code needs.

    Raises:
        UnsupportedError: They differ; the message names a tensor.
        ModelError: The headers of the files cannot be read.
    """
    config, entries = tensors_of(source_of(directory), config)
    _targets(config, directory, entries)


def checked_targets(
    config: ModelConfig, directory: Path, entries: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, dict[str, LoadTarget]]:
    """The targets of a whole model, with names and shapes as in its files; and the config that fits them.

    Raises UnsupportedError for other names, and ModelError for other shapes or dtypes.
    """
    targets = _targets(config, directory, entries)
    _check_shapes(targets, entries)
    if not _has_own_head(config, entries):
        return config, targets
    _log.warning(
        "%s: tensor %s differs from %s, so the two are not tied, though tie_word_embeddings says so",
        entries[_HEAD].file,
        _HEAD,
        EMBEDDING,
    )
    return checked_targets(dataclasses.replace(config, tie_word_embeddings=False), directory, entries)


def _of_text(entries: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of the text part, by their names in a text model.

    As in the library, tensors may be those of a base model, without a prefix; tied tensors may have either
    name; and the checkpoint may be multimodal, even if the config is only that of its text part. Stacked
    experts are separated.

    Raises ModelError if two tensors have the same name there, or experts cannot be separated.
    """
    found: dict[str, StoredTensor] = {}
    left_out = tuple(prefix.format(config.num_hidden_layers) for prefix in config.family.left_out)
    of_base = (*_IN_BASE_MODELS, f"{config.family.final_norm}.")
    for name, entry in of_text_model(entries.items()):
        if name.startswith(left_out):
            if config.has_mtp_head:
                found.update(_of_mtp_head(name, entry, config))
            continue
        renamed = config.family.renamed_tensor(_PREFIX + name if name.startswith(of_base) else name)
        if renamed in found:
            raise ModelError(f"{entry.file}: tensor {entry.name} is also there as {found[renamed].name}")
        found[renamed] = entry
    if config.has_mtp_head and f"model.layers.{config.num_hidden_layers}.eh_proj.weight" not in found:
        raise ModelError("the files have no head for multi-token prediction")
    if config.tie_word_embeddings and _HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(_HEAD)
    names = config.family.experts
    if names is None or names.stacked is None or config.experts is None:
        return found
    return separated(found, names, config.experts.count, config.hidden_size)


def _of_mtp_head(name: str, entry: StoredTensor, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    """Yields a tensor of an MTP head, by its name in a checkpoint of DeepSeek."""
    for before, after in config.family.mtp_names:
        prefix = before.format(config.num_hidden_layers)
        if name.startswith(prefix) and not name.endswith(_OF_MODEL_IN_MTP_HEAD):
            yield after.format(config.num_hidden_layers) + name.removeprefix(prefix), entry


def _targets(
    config: ModelConfig, directory: Path, entries: Mapping[str, StoredTensor]
) -> dict[str, LoadTarget]:
    """The targets of a whole model, to check names and shapes.

    Raises UnsupportedError unless a checkpoint has exactly their tensors.
    """
    # Checked before a target is made for each expert.
    count = config.experts.count if config.experts is not None else 0
    experts = count * sum(layer.sparse for layer in config.layers)
    if experts > len(entries):
        raise UnsupportedError(
            f"{directory}: the config asks for {experts} experts, but the files have {len(entries)} tensors"
        )
    targets = build_decoder(config, torch.float32, "meta").targets()
    for name in targets:
        if name not in entries:
            more = ", and tie_word_embeddings is false: a base model without a head" if name == _HEAD else ""
            raise UnsupportedError(f"{directory}: tensor {name} is missing{more}")
    for name, entry in entries.items():
        # A checkpoint with a tied head may contain the embedding twice.
        tied_head = name == _HEAD and config.tie_word_embeddings
        known = name in targets or tied_head or name.endswith(_COMPUTED_SUFFIX)
        if not known and not (name.endswith(_BIAS_SUFFIX) and _is_zero(entry)):
            # If a tensor such as a bias were ignored, the model would be a different one.
            kind = config.model_type
            raise UnsupportedError(f"{entry.file}: tensor {entry.name} is not part of this {kind} model")
    return targets


def _is_zero(entry: StoredTensor) -> bool:
    """Whether all elements of a vector are 0. Raises ModelError if it cannot be read."""
    is_vector = len(entry.shape) == 1 and entry.dtype in checkpoint.DTYPES
    return is_vector and all(isinstance(part, torch.Tensor) and not part.any() for _, part in entry.parts())


def _has_own_head(config: ModelConfig, entries: Mapping[str, StoredTensor]) -> bool:
    """Whether the config ties head and embedding, but the files have two that differ.

    The transformers library does not tie them then, either.
    """
    head, embedding = entries.get(_HEAD), entries[EMBEDDING]
    if head is None or not config.tie_word_embeddings:
        return False
    # Tensors of the same shape and dtype have the same parts. NaN is ignored here and refused later.
    return (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not all(
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and torch.equal(one.nan_to_num(), other.nan_to_num())
        for (_, one), (_, other) in zip(head.parts(), embedding.parts(), strict=True)
    )


def _check_shapes(targets: Mapping[str, LoadTarget], entries: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError unless each tensor has the shape of its target, and a dtype that is known."""
    for name, target in targets.items():
        entry = entries[name]
        if entry.shape != target.shape:
            shapes = f"shape {list(entry.shape)}, but the config asks for {list(target.shape)}"
            raise ModelError(f"{entry.file}: tensor {entry.name} has {shapes}")
        if entry.dtype not in checkpoint.DTYPES and (entry.form is None or len(target.shape) < _MATRIX):
            known = ", ".join(checkpoint.DTYPES)
            raise ModelError(f"{entry.file}: tensor {entry.name} must be one of {known}, got {entry.dtype}")
