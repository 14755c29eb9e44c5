"""The configuration file of the remote runtimes and of routing.

It is read at the start, and again on an operator's request. Its tables are the fields of `Runtimes`;
docs/runtimes.md has an example.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.errors import BadRuntimes, RuntimeNotFound
from service.extension import Extension
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.routing import Routing, RoutingRouter
from service.extensions.providers.runtime import RemoteRuntime
from service.extensions.providers.spending import Spending
from service.journal.values import StoredValues
from service.logging import get_logger
from service.printable import escaped
from service.runtimes.base import Runtime
from workers.common.trusted import require_trusted

_log = get_logger(__name__)
_MAX_BYTES = 1 << 20
_LINE = re.compile(r"\(at (line \d+|end of document)")
# The Python types that TOML values may have, by type of the setting.
_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    float | None: (int, float),
}


@dataclass(frozen=True, slots=True)
class Runtimes:
    """The parsed file. `providers` are by name."""

    routing: Routing = field(default_factory=Routing)
    runtimes: Mapping[str, ProviderConfig] = field(default_factory=dict)


class RuntimesFile(Extension):
    """The extension. Owner of the providers."""

    def __init__(self, path: Path) -> None:
        """Raises BadRuntimes."""
        self._path = path
        self._reading = asyncio.Lock()
        self._configured = load(path)
        self._providers: list[RemoteRuntime] = []
        self.runtimes = self

    def open_router(self, local: Runtime, values: StoredValues) -> RoutingRouter:
        """Creates the providers of the file, and the router. Spending is stored in `values`."""
        self._spending = Spending(values)
        self._providers = self._reuse_or_create(self._configured.runtimes.values())
        self.router = RoutingRouter([local, *self._providers], self._configured.routing)
        return self.router

    async def read_again(self, renewed: str = "") -> int:
        """Applies the file as it is now. Returns how many providers were recreated.

        These are the providers whose settings have changed, and `renewed`. Running batches finish with the
        old ones. Raises BadRuntimes or RuntimeNotFound; then nothing has changed.
        """
        async with self._reading:
            configured = await asyncio.to_thread(load, self._path)
            local = self.router.runtimes[0]
            if renewed not in ("", local.name, *configured.runtimes):
                raise RuntimeNotFound
            before, self._providers = (
                self._providers,
                self._reuse_or_create(configured.runtimes.values(), renewed),
            )
            self.router.replace([local, *self._providers], configured.routing)
            closing = [provider.close() for provider in before if provider not in self._providers]
            # Completes even if the caller is cancelled.
            await asyncio.shield(asyncio.gather(*closing))
        made = [provider.name for provider in self._providers if provider not in before]
        _log.info("the file of runtimes was read again", providers=len(self._providers), made_anew=made)
        return len(made)

    def _reuse_or_create(self, configs: Iterable[ProviderConfig], renewed: str = "") -> list[RemoteRuntime]:
        """A provider for each configuration. An existing one with the same settings is reused."""
        same = {provider.name: provider for provider in self._providers if provider.name != renewed}
        return [
            known
            if (known := same.get(config.name)) is not None and known.config == config
            else RemoteRuntime(config, spending=self._spending)
            for config in configs
        ]


def load(path: Path) -> Runtimes:
    """Reads a file. Raises BadRuntimes with the line number, but without contents of the file."""
    try:
        require_trusted(path)
        data = path.read_bytes()
        if len(data) > _MAX_BYTES:
            raise BadRuntimes(f"has more than {_MAX_BYTES} bytes")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise BadRuntimes(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # The rest of the error's text may quote the file.
        line = _LINE.search(str(error))
        raise BadRuntimes(f"{line[1]}: is not TOML" if line else "is not TOML") from None
    try:
        parsed = _dataclass(Runtimes, content, "")
    except ValueError as error:
        raise BadRuntimes(escaped(str(error))) from None
    assert isinstance(parsed, Runtimes)
    return parsed


def _dataclass(kind: type, table: Any, place: str, **given: str) -> Any:
    """Makes a dataclass of a table. `given`: fields that are not in the table. Raises ValueError."""
    table = _table(table, place)
    known = {setting.name: setting for setting in fields(kind) if setting.name not in given}
    for name in sorted(table.keys() - known.keys()):
        where = f"[{place}]" if place else "the file"
        raise ValueError(f"{where}: {name} is not known; there are {', '.join(sorted(known))}")
    for setting in known.values():
        is_needed = setting.default is MISSING and setting.default_factory is MISSING
        if is_needed and setting.name not in table:
            raise ValueError(f"[{place}]: {setting.name} is needed")
    types = get_type_hints(kind)
    values = {name: _value(types[name], value, f"{place}.{name}") for name, value in table.items()}
    try:
        return kind(**given, **values)
    except ValueError as error:
        raise ValueError(f"[{place}]: {error}") from None


def _value(wanted: Any, value: Any, place: str) -> Any:
    """Converts a value of the file to the type `wanted`. Raises ValueError."""
    place = place.removeprefix(".")
    choices = get_args(wanted)
    if isinstance(wanted, type) and is_dataclass(wanted):
        return _dataclass(wanted, value, place)
    if get_origin(wanted) is Mapping:
        kind = choices[1]
        # The name of a provider is the name of its table.
        named = [setting.name for setting in fields(kind) if setting.name == "name"]
        return {
            name: _dataclass(kind, table, f"{place}.{name}", **dict.fromkeys(named, name))
            for name, table in _table(value, place).items()
        }
    if get_origin(wanted) is Literal:
        if value not in choices:
            raise ValueError(f"{place}: must be one of {', '.join(choices)}")
    elif type(value) not in _TYPES[wanted]:
        raise ValueError(f"{place}: must be a {_TYPES[wanted][-1].__name__}")
    # Written so that a NaN fails.
    elif type(value) in (int, float) and not value >= 0:
        raise ValueError(f"{place}: must be a number from 0")
    return value


def _table(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a table")  # noqa: TRY004
    return value
