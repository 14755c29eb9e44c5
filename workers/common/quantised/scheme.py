"""How the matrices of a quantised model are stored, and which matrices a config speaks of.

The tensors say which matrices are quantised, and the config how. What is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

from workers.common.patterns import Patience, Pattern

# More than the longest list of names in use; a config has at most 1 MiB anyway.
_MAX_NAMES = 100_000
_MAX_PATTERNS = 64
_MAX_SHOWN = 60
_REGEX = "re:"


class NotUnderstood(Exception):
    """A config asks for something that cannot be served. The message names the setting."""


class Layout(Enum):
    """How a matrix is laid out in its tensors."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "pack-quantized"
    BYTES = "int-quantized"
    FLOAT8 = "float-quantized"
    TABLE = "bitsandbytes of 4 bits"
    ROWS_OF_BYTES = "bitsandbytes of 8 bits"
    MLX = "mlx"
    MLX_FLOATS = "mlx of 4-bit floats"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [O, I] is stored.

    Attributes:
        layout: In which tensors.
        bits: Of a value: 8; of integers also 2, 3 or 4, and of MLX's also 5 or 6.
        group: Of integers, the inputs with one scale; 0: a row has one, or the matrix.
        has_zeros: Integers have zero points.
        zero_offset: Added to the stored zero points.
        has_minima: Groups have minima, which are added.
        has_order: A group's inputs may be any ones, as a tensor says.
        block: Of 8-bit floats, the outputs and inputs with one scale; None: a row has one, or the matrix.
    """

    layout: Layout
    bits: int
    group: int = 0
    has_zeros: bool = False
    zero_offset: int = 0
    has_minima: bool = False
    has_order: bool = False
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Modules as compressed-tensors lists them: by name, by pattern ("re:...") or by kind ("Linear")."""

    exact: frozenset[str]
    patterns: tuple[Pattern, ...]

    @classmethod
    def read(cls, value: object, setting: str, patience: Patience) -> Names:
        """Raises NotUnderstood. `patience` is shared by all names of a config, and raises it too."""
        names = [] if value is None else value
        if not isinstance(names, list) or len(names) > _MAX_NAMES or not _are_texts(names):
            raise NotUnderstood(f"{setting}: must be a list of names, got {shown(value)}")
        patterns = sorted({one.removeprefix(_REGEX) for one in names if one.startswith(_REGEX)})
        if len(patterns) > _MAX_PATTERNS:
            raise NotUnderstood(f"{setting}: has {len(patterns)} patterns, and {_MAX_PATTERNS} are supported")
        compiled = tuple(_compiled(pattern, setting, patience) for pattern in patterns)
        return cls(frozenset(one for one in names if not one.startswith(_REGEX)), compiled)

    def have(self, module: str, kind: str) -> bool:
        """Whether a module is among them. Raises NotUnderstood if its patterns take too long to match."""
        return self.rank(module, kind) is not None

    def rank(self, module: str, kind: str) -> int | None:
        """How a module is among them; the least counts: 0 by its name, 1 by a pattern, 2 by its kind."""
        if module in self.exact:
            return 0
        if any(pattern.matches_start(module) for pattern in self.patterns):
            return 1
        return 2 if kind in self.exact else None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a config says.

    Attributes:
        method: Its name, as `quant_method` spells it.
        rules: Which modules are stored how. None: all.
        ignored: Modules that are not quantised.
        notes: What it says and has no effect here, one line for each.
    """

    method: str
    rules: Sequence[tuple[Names | None, Scheme]]
    ignored: Names
    notes: tuple[str, ...] = ()

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """How a module's matrix is stored if it is quantised; None: it must not be.

        Args:
            module: Its name in the files, such as "model.layers.0.mlp.up_proj".
            kind: "Linear" or "Embedding".

        Raises:
            NotUnderstood: The patterns take too long to match.
        """
        if self.ignored.have(module, kind):
            return None
        ranked = [(0 if names is None else names.rank(module, kind), scheme) for names, scheme in self.rules]
        found = [(rank, scheme) for rank, scheme in ranked if rank is not None]
        return min(found, key=lambda one: one[0])[1] if found else None


NO_NAMES = Names(frozenset(), ())


def _are_texts(values: list[object]) -> TypeGuard[list[str]]:
    return all(isinstance(one, str) for one in values)


def _compiled(pattern: str, setting: str, patience: Patience) -> Pattern:
    try:
        return Pattern(pattern, patience)
    except NotUnderstood as error:
        # It quotes the pattern, and is printed on a terminal.
        printable = "".join(one if one.isprintable() else "?" for one in str(error))
        raise NotUnderstood(f"{setting}: {printable}") from None


def shown(value: object) -> str:
    """A value from a config in a message: short, and printable."""
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def integer(settings: Mapping[str, object], name: str, default: int | None = None) -> int:
    """An integer. Raises NotUnderstood."""
    value = settings.get(name, default)
    if type(value) is not int:
        raise NotUnderstood(f"{name}: must be an integer, got {shown(value)}")
    return value


def boolean(settings: Mapping[str, object], name: str, *, default: bool | None = None) -> bool:
    """True or false; null is the default. Raises NotUnderstood."""
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise NotUnderstood(f"{name}: must be true or false, got {shown(value)}")
    return value


def one_of(settings: Mapping[str, object], name: str, *allowed: object, default: object = None) -> object:
    """A value of those that are allowed; null is the default. Raises NotUnderstood."""
    value = settings.get(name)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        named = " or ".join("null" if one is None else str(one) for one in allowed)
        raise NotUnderstood(f"{name}: must be {named}, got {shown(value)}")
    return value


def group_size(settings: Mapping[str, object], name: str = "group_size") -> int:
    """The inputs of a group; 0 for -1, a whole row. Raises NotUnderstood."""
    size = integer(settings, name)
    if size != -1 and not 0 < size < 1 << 24:
        raise NotUnderstood(f"{name}: must be -1 or positive, got {shown(size)}")
    return max(size, 0)


def block_sizes(settings: Mapping[str, object], name: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block. Raises NotUnderstood."""
    value = settings.get(name)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in sizes):
        raise NotUnderstood(f"{name}: must be two positive integers, got {shown(value)}")
    return sizes[0], sizes[1]
