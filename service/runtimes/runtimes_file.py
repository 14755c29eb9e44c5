"""The configuration file of the remote runtimes and of routing.

It is read at the start, and again when an operator asks for it.

    [routing]
    policy = "local-first"
    local_max_wait_s = 5
    when_full = "fallback"

    [runtimes.gpt]
    dialect = "openai-chat"
    base_url = "https://api.openai.com/v1"
    model = "gpt-x"
    api_key_env = "OPENAI_API_KEY"
    requests_per_minute = 500

    [runtimes.gpt.prices."gpt-x"]
    input_usd = 1.25
    output_usd = 10

The settings of a provider are the fields of `remote.config.ProviderConfig`.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.errors import BadRuntimes, RuntimeNotFound
from service.logging import get_logger
from service.printable import escaped
from service.runtimes.base import Runtime
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.prices import Prices
from service.runtimes.remote.runtime import RemoteRuntime
from service.runtimes.remote.spending import Spending
from service.runtimes.router import Router, Routing

_log = get_logger(__name__)
_MAX_BYTES = 1 << 20
_LINE = re.compile(r"\(at (line \d+|end of document)")
# Names of the server's own workers.
_TAKEN_NAMES = ("", "local")
# The Python types that are accepted for each type of a setting.
_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    float | None: (int, float),
}


@dataclass(frozen=True, slots=True)
class Runtimes:
    """The parsed file."""

    routing: Routing = field(default_factory=Routing)
    providers: tuple[ProviderConfig, ...] = ()


class RuntimesFile:
    """Owner of the providers and of the router."""

    def __init__(self, path: Path | None, local: Runtime, spending: Spending) -> None:
        """Without a path there are no providers. Raises BadRuntimes."""
        self._path = path
        self._spending = spending
        self._reading = asyncio.Lock()
        configured = Runtimes() if path is None else load(path)
        self._providers = [RemoteRuntime(config, spending=spending) for config in configured.providers]
        self.router = Router([local, *self._providers], configured.routing)

    async def read_again(self, renewed: str = "") -> int:
        """Applies the file as it is now. Returns how many providers were recreated.

        These are the ones whose settings have changed, and `renewed`. Running batches finish with the old
        ones. Raises BadRuntimes or RuntimeNotFound: nothing has changed.
        """
        if self._path is None:
            raise BadRuntimes("the server was started without one")
        async with self._reading:
            configured = await asyncio.to_thread(load, self._path)
            local = self.router.runtimes[0]
            if renewed not in ("", local.name, *(config.name for config in configured.providers)):
                raise RuntimeNotFound
            before, self._providers = self._providers, self._reuse_or_create(configured.providers, renewed)
            self.router.replace([local, *self._providers], configured.routing)
            closing = [provider.close() for provider in before if provider not in self._providers]
            # Completes even if the caller is cancelled.
            await asyncio.shield(asyncio.gather(*closing))
        made = [provider.name for provider in self._providers if provider not in before]
        _log.info("the file of runtimes was read again", providers=len(self._providers), made_anew=made)
        return len(made)

    def _reuse_or_create(self, configs: Sequence[ProviderConfig], renewed: str = "") -> list[RemoteRuntime]:
        """A provider for each configuration. An existing one with the same settings is reused."""
        same = {provider.name: provider for provider in self._providers if provider.name != renewed}
        return [
            known
            if (known := same.get(config.name)) is not None and known.config == config
            else RemoteRuntime(config, spending=self._spending)
            for config in configs
        ]


def load(path: Path) -> Runtimes:
    """Reads a file. Raises BadRuntimes with the line, but without contents of the file."""
    try:
        data = path.read_bytes()
        if len(data) > _MAX_BYTES:
            raise BadRuntimes(f"has more than {_MAX_BYTES} bytes")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise BadRuntimes(f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # The rest of the error's text may quote the file.
        line = _LINE.search(str(error))
        raise BadRuntimes(f"{line[1]}: is not TOML" if line else "is not TOML") from None
    try:
        return parse(content)
    except (ValueError, TypeError) as error:
        raise BadRuntimes(escaped(str(error))) from None


def parse(content: Mapping[str, Any]) -> Runtimes:
    """Converts the TOML tables. Raises ValueError or TypeError."""
    unknown = content.keys() - {"routing", "runtimes"}
    if unknown:
        raise ValueError(f"[{min(unknown)}]: is not known; there are [routing] and [runtimes.NAME]")
    routing = Routing(**_settings(Routing, content.get("routing", {}), "routing"))
    if not routing.local_max_wait_s >= 0:
        raise ValueError("routing.local_max_wait_s: must be a number from 0")
    runtimes = _table(content.get("runtimes", {}), "runtimes")
    return Runtimes(routing, tuple(_provider(name, settings) for name, settings in runtimes.items()))


def _provider(name: str, table: Any) -> ProviderConfig:
    place = f"runtimes.{name}"
    if name in _TAKEN_NAMES:
        raise ValueError(f"[{place}]: the name is that of the server's own workers")
    settings = _settings(ProviderConfig, table, place)
    prices = settings.pop("prices", {})
    try:
        return ProviderConfig(
            name=name,
            prices={model: _prices(p, f"{place}.prices") for model, p in prices.items()},
            **settings,
        )
    except ValueError as error:
        raise ValueError(f"[{place}]: {error}") from None


def _prices(settings: Any, place: str) -> Prices:
    settings = _table(settings, place)
    _check_names(settings, [known.name for known in fields(Prices)], place)
    for key, value in settings.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ValueError(f"{place}: {key} must be a number of US dollars from 0")
    try:
        return Prices(**settings)
    except TypeError:
        raise ValueError(f"{place}: needs input_usd and output_usd") from None


def _settings(kind: type, table: Any, place: str) -> dict[str, Any]:
    """A table as keyword arguments of a dataclass. Raises ValueError or TypeError if they do not fit."""
    table = _table(table, place)
    known = [setting for setting in fields(kind) if setting.name != "name"]
    _check_names(table, [setting.name for setting in known], place)
    for setting in known:
        is_needed = setting.default is MISSING and setting.default_factory is MISSING
        if is_needed and setting.name not in table:
            raise ValueError(f"[{place}]: {setting.name} is needed")
    types = get_type_hints(kind)
    for name, value in table.items():
        _check_value(value, types[name], f"{place}.{name}")
    return dict(table)


def _check_value(value: Any, wanted: Any, place: str) -> None:
    choices = get_args(wanted)
    if get_origin(wanted) is Literal and value not in choices:
        raise ValueError(f"{place}: must be one of {', '.join(choices)}")
    if get_origin(wanted) is Mapping:
        _table(value, place)
    elif wanted in _TYPES and type(value) not in _TYPES[wanted]:
        raise ValueError(f"{place}: must be a {_TYPES[wanted][-1].__name__}")


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{place}: must be a table")
    return value


def _check_names(table: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    unknown = table.keys() - set(known)
    if unknown:
        raise ValueError(f"{place}: {min(unknown)} is not known; there are {', '.join(sorted(known))}")
