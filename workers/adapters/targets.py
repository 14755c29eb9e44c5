"""The targets of a config: target_modules, exclude_modules, layers_to_transform, target_parameters.

PEFT ignores tensors of modules that are not targets, so the targets are compared with the file's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.adapters.errors import AdapterError, quoted
from workers.common.patterns import Patience, Pattern

ALL_LINEAR = "all-linear"

Matches = Callable[[str], bool]


class Targets:
    """The modules that a config names, as PEFT finds them (`check_target_module_exists`)."""

    def __init__(self, settings: Mapping[str, object], patience: Patience) -> None:
        """Read the settings. Raises AdapterError."""
        targets, parameters = settings.get("target_modules"), settings.get("target_parameters")
        if targets is None and not parameters:
            raise AdapterError("target_modules: must name the modules that are adapted, got nothing")
        self._parameters = _matcher("target_parameters", parameters or [], patience)
        if isinstance(parameters, str):
            raise AdapterError(f"target_parameters: must be a list of names, got {quoted(parameters)}")
        targets = [] if targets is None else targets
        self._matches = _matcher("target_modules", targets, patience)
        self._names = frozenset(targets) if isinstance(targets, list) else frozenset()
        excluded = settings.get("exclude_modules")
        self._excludes = _matcher("exclude_modules", excluded, patience) if excluded else None
        self._layers = None if isinstance(targets, str) else _layers(settings.get("layers_to_transform"))
        self._containers = _containers(settings.get("layers_pattern"))

    def __contains__(self, name: str) -> bool:
        """Whether a module is adapted. Raises AdapterError if a pattern takes too long to match."""
        if self._excludes is not None and self._excludes(name):
            return False
        # PEFT does not check the layer of a module that is named in full.
        return name in self._names or (self._matches(name) and self._is_in_layers(name))

    def has_parameter(self, name: str) -> bool:
        """Whether a parameter is adapted, in any module."""
        return self._parameters(name)

    def _is_in_layers(self, name: str) -> bool:
        if self._layers is None:
            return True
        parts = name.split(".")
        for at in range(1, len(parts) - 1):
            fits = not self._containers or parts[at - 1] in self._containers
            if fits and parts[at].isdecimal():
                return int(parts[at]) in self._layers
        return False


def _matcher(setting: str, value: object, patience: Patience) -> Matches:
    """The test for a setting: a pattern, or a list of names or ends of names. Raises AdapterError."""
    if isinstance(value, str):
        if setting == "target_modules" and value.lower() == ALL_LINEAR:
            return lambda _: True
        try:
            return Pattern(value, patience).matches
        except AdapterError as error:
            raise AdapterError(f"{setting}: {error}") from None
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise AdapterError(f"{setting}: must be a pattern or a list of names, got {quoted(value)}")
    names = frozenset(value)

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[at:]) in names for at in range(len(parts)))

    return matches


def _layers(value: object) -> frozenset[int] | None:
    """The numbers of the adapted layers. None: all. Raises AdapterError."""
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(type(layer) is not int for layer in layers):
        raise AdapterError(f"layers_to_transform: must be a list of layer numbers, got {quoted(value)}")
    return frozenset(layers)


def _containers(value: object) -> frozenset[str]:
    """The names of the lists of layers; empty: any. Raises AdapterError."""
    names = [value] if isinstance(value, str) and value else value or []
    # PEFT uses them as patterns. A name without special characters matches only itself.
    if not isinstance(names, list) or any(
        not isinstance(name, str) or not name.isidentifier() for name in names
    ):
        raise AdapterError(f"layers_pattern: must be a name such as layers, or a list, got {quoted(value)}")
    return frozenset(names)
