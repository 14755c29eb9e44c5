"""What a package can add to a gateway without a change here: a port of its own, or what observes calls.

An extension is found by an entry point of the group `quire.extensions`, which names its settings: a subclass
of `ExtensionSettings`. Their `opened_by` is a function that gets all settings and returns an `Extension`, or
None if these do not ask for it. It is called before any other part exists, so it should import its libraries
only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service.adapters.registry import Adapters
from service.api.executor import ExecutorApi
from service.api.interceptor import Observing
from service.api.server_state import ServerState
from service.auth.authenticator import Authenticator
from service.caches.machine import CacheMachine
from service.config import Config, installed_extensions
from service.dispatcher import ObserveAppends
from service.logging import get_logger
from service.pool.launcher import Launcher
from service.pool.model_versions import ModelVersions, WorkerSlot
from service.runtimes.base import Runtime
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.text.text_model import TextModel

_log = get_logger(__name__)

# Returns an ASGI application that does more than the given one.
WrapHttp = Callable[[Any], Any]
# Returns what starts the workers of a shard. Raises ConfigError. Is given the settings, where it keeps what
# the next gateway needs to know of them (None: nothing survives), and what it calls once no other gateway
# uses that directory.
NewLauncher = Callable[[Config, Path | None, Callable[[], None]], Launcher]


class RuntimeSource(Protocol):
    """What runs whole texts beside this server's workers."""

    def open_router(self, local: Runtime, data_dir: Path | None) -> Router:
        """The router of all runtimes, the given one first. Called once.

        `data_dir`: None: nothing survives.
        """

    async def read_again(self, renewed: str) -> int:
        """Applies the configuration as it is now; `renewed`: a runtime that is made anew in any case.

        Returns how many were. Raises BadRuntimes or RuntimeNotFound: nothing has changed.
        """


class ServedShard(Protocol):
    """A shard of the gateway: its caches and its workers."""

    caches: CacheMachine
    versions: ModelVersions


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway, for its extensions.

    Attributes:
        state: With the settings, the limits of answers, and the log of calls.
        api: The calls of gRPC, of a caller in the same process.
        authenticator: None: there are no tokens.
        shards: Those that the gateway has now; the one that it got first is the first.
        http: What other extensions do with each HTTP request, the first one outermost.
        num_http_connections: Of all extensions.
    """

    state: ServerState
    api: ExecutorApi
    authenticator: Authenticator | None
    text: TextModel
    executions: Executions
    router: Router
    adapters: Adapters
    shards: Callable[[], Sequence[ServedShard]]
    http: Sequence[WrapHttp]
    num_http_connections: Callable[[], int]

    def slots(self) -> list[WorkerSlot]:
        """The workers of all shards."""
        return [slot for shard in self.shards() for slot in shard.versions.all_slots]


class Extension:
    """An extension of one gateway. Each has what it needs of this.

    Attributes:
        calls: Returns a behaviour of gRPC that does more than the given one; see `Observing`.
        appends: Is called with each request for caches; see `ObserveAppends`.
        commits: Is called with the seconds that each commit of the journal took.
        http: See `WrapHttp`.
        launcher: See `NewLauncher`. None: the core's own start them.
        runtimes: See `RuntimeSource`. None: there is only the local one.
        listen: The address of its port, as the settings have it; "": it has none.
        port_for: What the port is for, in the log.
    """

    calls: Observing | None = None
    appends: ObserveAppends | None = None
    commits: Callable[[float], None] | None = None
    http: WrapHttp | None = None
    launcher: NewLauncher | None = None
    runtimes: RuntimeSource | None = None
    listen = ""
    port_for = ""

    def attach(self, parts: GatewayParts) -> None:
        """Called once, when all parts exist and nothing runs. Raises ConfigError."""

    def bind(self) -> int:
        """Binds `listen`; clients can connect from now on. Returns the port. Raises CannotListen."""
        raise NotImplementedError

    @property
    def num_connections(self) -> int:
        """Connections of its port, if they count as those of callers."""
        return 0

    async def run(self) -> None:
        """Runs until cancelled."""

    async def stop(self, grace_s: float) -> None:
        """Ends its requests, after running ones had this time. All executions have ended."""

    async def finish(self) -> None:
        """Called when nothing runs any more."""

    def close(self) -> None:
        """Called last."""


def open_extensions(config: Config) -> list[Extension]:
    """Those that the settings ask for, by name. Raises ConfigError."""
    found = []
    for name, settings in installed_extensions().items():
        if isinstance(settings, str):
            _log.warning("an extension is missing", extension=name, module=settings)
            continue
        module, _, function = settings.opened_by.partition(":")
        make: Callable[[Config], Extension | None] = getattr(importlib.import_module(module), function)
        extension = make(config)
        if extension is not None:
            found.append(extension)
    return found
