"""How a setting is declared, and what follows from it: its flag, variable and key, its help, and its check.

A setting is a field of a frozen dataclass: `Config`, or the settings of an extension. Its declaration has its
default, its meaning and the values that it can have. `config_sources` reads the sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeAlias

from service.setting_rules import AUTO, SWITCH, Range, Rule, Text, is_directory, is_file, is_path

ENV_PREFIX = "QUIRE_"
_PLACE = "setting"
# More choices than these are not in the usage, only in the help of their flag.
_MOST_IN_USAGE = 6


class ConfigError(Exception):
    """An invalid setting: its name, its source, its value, and the allowed values.

    Without a source, `Settings.said` finds it.
    """

    def __init__(self, setting: str, source: str, value: object, allowed: str) -> None:
        value = _without_password(value)
        # As TOML has it. Its texts can be quoted as Python quotes them.
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        super().__init__(f"{setting} = {shown}{source and f' (from {source})'} is refused: {allowed}")
        self.setting = setting
        self.source = source
        self.value = value
        self.allowed = allowed


# The names of settings that do not fit each other, first of the one that is refused; and why.
Conflict: TypeAlias = tuple[tuple[str, ...], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """The properties of a setting that is an address to listen on.

    Attributes:
        needs_tls: Unless only this machine can reach it.
        of_each_gateway: Each of several gateways has its own, on ports that follow each other.
    """

    needs_tls: bool = False
    of_each_gateway: bool = False


def setting(default: Any, help_text: str, rule: Rule, *, group: str = "", port: Port | None = None) -> Any:
    """Declares a field as a setting. None as the default is `auto`.

    `group`, in the help, is that of this setting and of those up to the next with a group.
    """
    return dataclasses.field(default=default, metadata={_PLACE: (help_text, rule, group, port)})


class Setting:
    """A declared setting."""

    def __init__(self, owner: type[Any], field: dataclasses.Field[Any], hint: Any) -> None:
        self.owner = owner
        self.name = field.name
        self.flag = "--" + field.name.replace("_", "-")
        self.env = ENV_PREFIX + field.name.upper()
        self.is_optional = isinstance(hint, types.UnionType)
        self.kind: type = typing.get_args(hint)[0] if self.is_optional else hint
        self.default = field.default
        self.help: str
        self.group: str
        self.port: Port | None
        self._rule: Rule
        self.help, self._rule, self.group, self.port = field.metadata[_PLACE]
        self.choices = self._rule if isinstance(self._rule, tuple) else ()

    @property
    def allowed(self) -> str:
        """The valid values, in words."""
        match self._rule:
            case Range(minimum, maximum):
                number = "a whole number" if self.kind is int else "a number"
                or_auto = f", or {AUTO}" if self.is_optional else ""
                return f"must be {number} from {plain(minimum)} to {plain(maximum)}{or_auto}"
            case Text(allowed=allowed):
                return allowed
        return "must be one of " + ", ".join(self.choices)

    def parse(self, value: object, source: str, *, text: bool) -> Any:
        """Converts and checks one value. `text`: the source has only strings, so numbers are parsed."""
        if self.is_optional and value == AUTO:
            return None
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            parsed = self._convert(value, text=text)
            match self._rule:
                case Range(minimum, maximum):
                    is_valid = minimum <= parsed <= maximum
                case Text(accepts=accepts):
                    is_valid = accepts(parsed)
                case choices:
                    is_valid = parsed in choices
            if is_valid:
                return parsed
        raise ConfigError(self.name, source, value, self.allowed)

    @property
    def default_text(self) -> str:
        return AUTO if self.default is None else f"{self.default}" or "none"

    @property
    def is_switch(self) -> bool:
        return self.choices == SWITCH

    @property
    def is_path(self) -> bool:
        """Whether it names a file or a directory of this machine."""
        return isinstance(self._rule, Text) and self._rule.accepts in (is_file, is_directory, is_path)

    @property
    def metavar(self) -> str:
        if isinstance(self._rule, Text) and self._rule.accepts in (is_file, is_directory):
            return "FILE" if self._rule.accepts is is_file else "DIRECTORY"
        if len(self.choices) > _MOST_IN_USAGE:
            return "NAME"
        return "|".join(self.choices) or self.kind.__name__.upper()

    def _convert(self, value: object, *, text: bool) -> Any:
        accepted = (int, float) if self.kind is float else (self.kind,)
        # In Python a bool is an int, but `workers = true` is a mistake.
        if not text and (isinstance(value, bool) or not isinstance(value, accepted)):
            raise TypeError
        if "\0" in str(value):
            raise ValueError
        return self.kind(value)


def declared(owner: type[Any]) -> list[Setting]:
    """The settings that a dataclass declares. Its other fields are none."""
    hints = typing.get_type_hints(owner)
    return [
        Setting(owner, field, hints[field.name])
        for field in dataclasses.fields(owner)
        if _PLACE in field.metadata
    ]


@contextlib.contextmanager
def needing_extra(extra: str, setting: str, value: str) -> Iterator[None]:
    """Raises ConfigError if a library is not installed that the setting needs, of an extra of the wheel."""
    try:
        yield
    except ModuleNotFoundError as error:
        allowed = f"needs {error.name}, of the extra {extra}: `make setup` installs it"
        raise ConfigError(setting, "", value, allowed) from None


def plain(number: float) -> str:
    """A number for messages, without an exponent."""
    return str(int(number)) if number == int(number) else str(number)


def _without_password(value: object) -> object:
    """The value as it may be shown: addresses without passwords."""
    if not isinstance(value, str) or "://" not in value:
        return value
    value = re.sub(r"://([^/?#@]*?):.*@", r"://\1:***@", value, flags=re.DOTALL)
    # Its name may be written in another way.
    return re.sub(r"(assword=)[^&#]*", r"\1***", value, flags=re.IGNORECASE)
