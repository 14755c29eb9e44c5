"""Reads adapter_config.json: the rank and scale of each module, and which modules are adapted.

A setting that PEFT would compute differently is refused by name. Does not read tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from workers.adapters.errors import AdapterError, errors_of_file, quoted
from workers.adapters.targets import Targets
from workers.common.patterns import Patience, Pattern
from workers.models.files import read_object
from workers.models.values import boolean, integer, names

CONFIG_FILE = "adapter_config.json"

_MAX_ALPHA = 1e12


_READ = names(
    """
    peft_type task_type bias r lora_alpha use_rslora use_dora rank_pattern alpha_pattern init_lora_weights
    target_modules target_parameters exclude_modules layers_to_transform layers_pattern
    """
)
# Settings without an effect at any value: the origin of the file, training, and settings of what is refused
# elsewhere. Whole modules, for example, are refused by their tensors.
_WITHOUT_EFFECT = names(
    """
    auto_mapping base_model_name_or_path revision peft_version inference_mode lora_dropout runtime_config
    modules_to_save loftq_config eva_config corda_config lora_ga_config qalora_group_size megatron_core
    ensure_weight_tying
    """
)
MERGE = "merge the adapter into the model and serve that"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The settings of the adapted modules. Names of modules are those in the directory.

    Attributes:
        rank: The rank of modules that no pattern of ranks matches.
        alpha: The alpha of modules that no pattern of alphas matches.
        is_rank_stabilized: The scale is alpha / sqrt(rank) instead of alpha / rank.
        is_dora: Each output of an adapted module is scaled to its own magnitude (DoRA).
        ranks: Pairs (pattern, rank); the first that matches a module counts.
        alphas: The same for alpha.
        targets: The modules that are adapted.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    is_dora: bool
    ranks: tuple[tuple[Pattern, int], ...]
    alphas: tuple[tuple[Pattern, float], ...]
    targets: Targets

    def rank_of(self, name: str) -> int:
        """The rank of a module. Raises AdapterError if a pattern takes too long to match."""
        return _first(self.ranks, name, self.rank)

    def scale_of(self, name: str, rank: int) -> float:
        """The factor of a module's B A. Raises AdapterError if a pattern takes too long to match."""
        return _first(self.alphas, name, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_settings(directory: Path) -> LoraSettings:
    """Read adapter_config.json.

    Raises AdapterError if the file cannot be read, or a setting is missing, invalid or not supported.
    """
    file = directory / CONFIG_FILE
    with errors_of_file(file):
        settings = read_object(file)
        _check_kind(settings)
        _check_keys(settings)
        patience = Patience(AdapterError)
        return LoraSettings(
            rank=integer(settings, "r"),
            alpha=signed_number("lora_alpha", settings.get("lora_alpha")),
            is_rank_stabilized=boolean(settings, "use_rslora", default=False),
            is_dora=boolean(settings, "use_dora", default=False),
            ranks=tuple(
                (_pattern("rank_pattern", text, patience), integer({"rank_pattern": rank}, "rank_pattern"))
                for text, rank in _patterns(settings, "rank_pattern").items()
            ),
            alphas=tuple(
                (_pattern("alpha_pattern", text, patience), signed_number("alpha_pattern", alpha))
                for text, alpha in _patterns(settings, "alpha_pattern").items()
            ),
            targets=Targets(settings, patience),
        )


def _check_kind(settings: Mapping[str, object]) -> None:
    """Raises AdapterError unless it is LoRA for an unchanged language model, without biases."""
    for name, wanted, is_optional in (
        ("peft_type", "LORA", False),
        ("task_type", "CAUSAL_LM", True),
        ("bias", "none", True),
    ):
        value = settings.get(name)
        if value != wanted and not (is_optional and value is None):
            raise AdapterError(f"{name}: only {wanted} is supported, got {quoted(value)}")
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGING_INITS):
        raise AdapterError(
            f"init_lora_weights: {quoted(init)} changes the weights of the model: save the adapter with"
            " path_initial_model_for_weight_conversion, which makes it plain LoRA, or merge it"
        )
    if init is not None and not isinstance(init, bool) and init not in _PLAIN_INITS:
        raise AdapterError(f"init_lora_weights: is not supported, got {quoted(init)}")


def _check_keys(settings: Mapping[str, object]) -> None:
    """Raises AdapterError for a setting that might change the result."""
    for name in sorted(settings.keys() - _READ - _WITHOUT_EFFECT):
        value = settings[name]
        if value:
            raise AdapterError(f"{quoted(name)}: only plain LoRA is supported, got {quoted(value)}: {MERGE}")


def _patterns(settings: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise AdapterError(f"{name}: must be an object, got {quoted(value)}")
    return value or {}


def _pattern(setting: str, text: str, patience: Patience) -> Pattern:
    try:
        return Pattern(text, patience)
    except AdapterError as error:
        raise AdapterError(f"{setting}: {error}") from None


def signed_number(name: str, value: object) -> float:
    """A number that may be 0 or negative. Raises AdapterError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        got = "nothing" if value is None else quoted(value)
        raise AdapterError(f"{name}: must be a number of at most {_MAX_ALPHA:.0e}, got {got}")
    return float(value)


def _first(patterns: tuple[tuple[Pattern, N], ...], name: str, default: N) -> N:
    return next((value for pattern, value in patterns if pattern.matches_end(name)), default)
