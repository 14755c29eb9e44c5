"""The file that names the runtimes beside the server's own, and says who takes a batch.

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

Settings of a provider are those of `remote.config.ProviderConfig`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from service.errors import BadRuntimes
from service.printable import escaped
from service.runtimes.remote.config import BudgetPolicy, ProviderConfig
from service.runtimes.remote.prices import Prices
from service.runtimes.router import PolicyName, Routing, WhenFull

_MAX_BYTES = 1 << 20
_LINE = re.compile(r"\(at (line \d+|end of document)")
# The server's own.
_TAKEN_NAMES = ("", "local")


@dataclass(frozen=True, slots=True)
class Runtimes:
    """What the file says."""

    routing: Routing = field(default_factory=Routing)
    providers: tuple[ProviderConfig, ...] = ()


def load(path: Path) -> Runtimes:
    """Reads a file. Raises BadRuntimes, which names the place in it, and none of its contents."""
    try:
        data = path.read_bytes()
        if len(data) > _MAX_BYTES:
            raise BadRuntimes(f"has more than {_MAX_BYTES} bytes")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise BadRuntimes(f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # What else such an error says may quote the file.
        line = _LINE.search(str(error))
        raise BadRuntimes(f"{line[1]}: is not TOML" if line else "is not TOML") from None
    try:
        return parse(content)
    except (ValueError, TypeError) as error:
        raise BadRuntimes(escaped(str(error))) from None


def parse(content: Mapping[str, Any]) -> Runtimes:
    """What a parsed file says. Raises ValueError or TypeError."""
    unknown = content.keys() - {"routing", "runtimes"}
    if unknown:
        raise ValueError(f"[{min(unknown)}]: is not known; there are [routing] and [runtimes.NAME]")
    routing = _routing(_table(content.get("routing", {}), "routing"))
    runtimes = _table(content.get("runtimes", {}), "runtimes")
    return Runtimes(routing, tuple(_provider(name, settings) for name, settings in runtimes.items()))


def _routing(settings: Mapping[str, Any]) -> Routing:
    _check_names(settings, [known.name for known in fields(Routing)], "routing")
    _check_choice(settings.get("policy", "order"), get_args(PolicyName), "routing.policy")
    _check_choice(settings.get("when_full", "queue"), get_args(WhenFull), "routing.when_full")
    wait_s = settings.get("local_max_wait_s", 0)
    if type(wait_s) not in (int, float) or not wait_s >= 0:
        raise ValueError("routing.local_max_wait_s: must be a number from 0")
    return Routing(**settings)


def _provider(name: str, settings: Any) -> ProviderConfig:
    place = f"runtimes.{name}"
    settings = dict(_table(settings, place))
    if name in _TAKEN_NAMES:
        raise ValueError(f"[{place}]: the name is that of the server's own workers")
    known = {setting.name: setting for setting in fields(ProviderConfig) if setting.name != "name"}
    _check_names(settings, known, place)
    for needed in ("dialect", "base_url", "model"):
        if needed not in settings:
            raise ValueError(f"[{place}]: {needed} is needed")
    for key, value in settings.items():
        _check_type(value, str(known[key].type), f"{place}.{key}")
    prices = _table(settings.pop("prices", {}), f"{place}.prices")
    if "budget_policy" in settings:
        _check_choice(
            settings["budget_policy"], [policy.value for policy in BudgetPolicy], f"{place}.budget_policy"
        )
        settings["budget_policy"] = BudgetPolicy(settings["budget_policy"])
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


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{place}: must be a table")
    return value


def _check_names(settings: Mapping[str, Any], known: Any, place: str) -> None:
    unknown = settings.keys() - set(known)
    if unknown:
        raise ValueError(f"{place}: {min(unknown)} is not known; there are {', '.join(sorted(known))}")


def _check_choice(value: Any, choices: Any, place: str) -> None:
    if value not in choices:
        raise ValueError(f"{place}: must be one of {', '.join(choices)}")


def _check_type(value: Any, wanted: str, place: str) -> None:
    """Annotations are of a few kinds."""
    if wanted.startswith("str") or wanted == "BudgetPolicy":
        good = isinstance(value, str)
    elif wanted.startswith("bool"):
        good = isinstance(value, bool)
    elif wanted.startswith("int"):
        good = type(value) is int
    elif wanted.startswith("float"):
        good = type(value) in (int, float)
    else:
        good = isinstance(value, Mapping)
    if not good:
        raise ValueError(f"{place}: must be a {wanted.partition(' ')[0].lower()}")
