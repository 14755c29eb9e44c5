"""Reads an adapter: adapter_config.json and adapter_model.safetensors, with LoRA in PEFT's layout.

A directory may be hostile: nothing in it is run, and everything is checked before memory is allocated.
Anything but plain LoRA is refused by name. Knows no slots, and of models only the shapes of projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workers.adapters.config import CONFIG_FILE, MERGE, LoraSettings, read_settings
from workers.adapters.errors import AdapterError, errors_of_file, quoted
from workers.adapters.steering import read_steering, read_strength
from workers.adapters.tensors import WEIGHTS_FILE, PairEntries, find_pairs, name_in_file, read_pairs
from workers.common.adapter_files import file_identity
from workers.models.lora import Adaptable, LoraPair, LoraWeights

PICKLE_FILE = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a model.

    Attributes:
        weights: The pairs by the names of the model's modules; float32, owned by the caller.
        rank: The largest rank; 0: it is a steering vector.
        identity: The identity of the directory when it was read; see `identity`.
        steering: The vectors added after layers, by layer; float32, owned by the caller.
    """

    weights: LoraWeights
    rank: int
    identity: str
    steering: Mapping[int, torch.Tensor] = field(default_factory=dict)


def read_adapter(directory: Path, model: Adaptable, *, max_rank: int, max_bytes: int) -> Adapter:
    """Read an adapter. Takes at most `max_bytes` of memory and a few MiB.

    Args:
        directory: The adapter. Its two files may be links, as in a snapshot of the hub.
        model: The parts of the model that adapters may change.
        max_rank: The largest rank that is allowed.
        max_bytes: The most memory that the weights may take, as float32.

    Raises:
        AdapterError: The adapter is not supported, does not fit the model, or changed while it was read.
    """
    before = identity(directory)
    strength = read_strength(directory)
    if strength is not None:
        vectors = read_steering(directory, model.steering_shape, strength=strength, max_bytes=max_bytes)
        return _unchanged(directory, Adapter({}, 0, before, vectors))
    settings = read_settings(directory)
    if settings.is_dora and not model.takes_dora:
        raise AdapterError(f"{CONFIG_FILE}: use_dora: DoRA needs --device cpu and one rank, or {MERGE}")
    pairs = find_pairs(directory, model, settings)
    with errors_of_file(directory / CONFIG_FILE):
        _check_targets(settings, pairs, model)
        scales = {module: _scale(settings, pair, max_rank) for module, pair in pairs.items()}
    size_bytes = sum(pair.size_bytes for pair in pairs.values())
    if size_bytes > max_bytes:
        raise AdapterError(
            f"{WEIGHTS_FILE}: needs {-(-size_bytes >> 20)} MiB as float32, and {max_bytes >> 20} MiB are"
            " allowed: use a smaller rank, or raise the limit"
        )
    weights: dict[str, LoraPair] = {}
    for name, pair in pairs.items():
        for module, read in read_pairs(name, pair, scales[name]):
            if module in weights:
                raise AdapterError(
                    f"{WEIGHTS_FILE}: {quoted(module)} is adapted by itself and by a parameter"
                )
            weights[module] = read
    return _unchanged(directory, Adapter(weights, max(pair.rank for pair in pairs.values()), before))


def _unchanged(directory: Path, adapter: Adapter) -> Adapter:
    """Returns the adapter. Raises AdapterError if files have changed since it was read."""
    if identity(directory) != adapter.identity:
        raise AdapterError("has changed while it was read: try again when no process writes to it")
    return adapter


def identity(directory: Path) -> str:
    """A text that changes when a file of an adapter is written to or replaced. Takes microseconds.

    Raises AdapterError if a file is missing.
    """
    parts = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            parts.append(file_identity(directory / name))
        except (OSError, ValueError) as error:
            if name == WEIGHTS_FILE and (directory / PICKLE_FILE).exists():
                raise AdapterError(
                    f"{PICKLE_FILE}: is a pickle, which runs code when it is loaded: save the adapter again"
                    " with safe_serialization=True"
                ) from error
            raise AdapterError(f"{name}: cannot be read: {getattr(error, 'strerror', error)}") from error
    return ".".join(parts)


def _check_targets(settings: LoraSettings, pairs: Mapping[str, PairEntries], model: Adaptable) -> None:
    """Raises AdapterError unless the modules and parameters with tensors are those that the config names."""
    for pair in pairs.values():
        if pair.stack is None and pair.name not in settings.targets:
            raise AdapterError(
                f"target_modules: module {quoted(pair.name)} has tensors, but is not named: PEFT would ignore"
                " them, so name it or remove them"
            )
    example = next(iter(pairs.values())).name
    of_experts = {module for stack in model.stacks.values() for expert in stack.modules for module in expert}
    if settings.is_dora and not pairs.keys().isdisjoint({*of_experts, *model.stacks}):
        raise AdapterError(f"use_dora: DoRA of experts is not supported: {MERGE}")
    # If no expert has an adapter of its own, experts were no modules for the library that saved it.
    left_out = of_experts if of_experts.isdisjoint(pairs) else set()
    modules = [module for module in model.modules if module not in left_out]
    for setting, every, is_named in (
        ("target_modules", modules, settings.targets.__contains__),
        ("target_parameters", model.stacks, settings.targets.has_parameter),
    ):
        for module in every:
            name = name_in_file(module, example)
            if module not in pairs and is_named(name):
                kind = setting.removeprefix("target_").removesuffix("s")
                raise AdapterError(
                    f"{setting}: names {kind} {quoted(name)}, which has no tensors: check that the adapter"
                    " is complete and for this model"
                )


def _scale(settings: LoraSettings, pair: PairEntries, max_rank: int) -> float:
    """The factor of a module's B A. Raises AdapterError for a wrong or too large rank."""
    rank = settings.rank_of(pair.name)
    if rank != pair.rank:
        raise AdapterError(
            f"r, rank_pattern: the rank of module {quoted(pair.name)} is {rank}, but that of its tensors is"
            f" {pair.rank}"
        )
    if rank > max_rank:
        raise AdapterError(f"r: the rank of module {quoted(pair.name)} is {rank}, and {max_rank} is allowed")
    return settings.scale_of(pair.name, rank)
