"""What a package can add to a gateway without a change here: a journal, runtimes, a port, other gateways, ...

An extension is found by an entry point of the group `quire.extensions`, which names its settings: a subclass
of `ExtensionSettings`, which opens an `Extension` when a gateway starts. Before that, all are asked whether
they serve in place of a gateway in this process.

What extensions implement is defined where the core uses it: `Journal` in service/journal/base.py, `Launcher`
in service/pool/launcher.py, `Runtime` and `ChunkSink` in service/runtimes/base.py, `OtherShards` in
service/api/other_shards.py. All else is on this page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service.adapters.registry import Adapters
from service.admin import AdminApi, Stop
from service.api.executor import ExecutorApi
from service.api.interceptor import CallInterceptor, Observing
from service.api.other_shards import OtherShards
from service.api.server_state import ServerState
from service.auth.authenticator import Authenticator
from service.caches.machine import CacheMachine
from service.config import Config, ExtensionUnusable, failed_extension, installed_extensions
from service.dispatcher import Dispatcher, ObserveAppends
from service.journal.values import StoredValues
from service.logging import get_logger
from service.pool.launcher import Launcher
from service.pool.model_versions import ModelVersions, WorkerSlot
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.base import Runtime
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from service.settings import ConfigError
from service.shard import OpenJournal, OpenShard, Shard
from service.text.text_model import TextModel

_log = get_logger(__name__)

# Returns an ASGI application that does more than the given one.
WrapHttp = Callable[[Any], Any]
# Returns what starts the workers of a shard. Raises ConfigError. Is given the settings, and where it keeps
# what the next gateway needs to know of them (None: nothing survives).
NewLauncher = Callable[[Config, Path | None], Launcher]
# Opens the shard that a gateway begins with, and may wait until it gets one. Is given what opens journals.
# Raises JournalUnusable or ConfigError.
OpenHome = Callable[[OpenJournal], Awaitable[OpenShard]]
# What a gateway takes from one extension.
_ONLY_ONE = ("launcher", "runtimes", "journal", "open_home")


class RuntimeSource(Protocol):
    """Runtimes that generate whole texts, beside this server's workers."""

    def open_router(self, local: Runtime, values: StoredValues) -> Router:
        """The router of all runtimes, the given one first. Called once.

        `values`: where it can keep a value under a name that begins with its own, for the next gateway.
        """

    async def read_again(self, renewed: str) -> int:
        """Applies the configuration as it is now; `renewed`: a runtime that is made anew in any case.

        Returns how many were. Raises BadRuntimes or RuntimeNotFound: nothing has changed.
        """


class ServedShard(Protocol):
    """A shard that this gateway has: a core.

    values: What an extension wants the next gateway to find, under names that begin with the extension's.
    """

    shard: Shard
    values: StoredValues
    caches: CacheMachine
    versions: ModelVersions
    pool: Supervisor
    dispatcher: Dispatcher
    api: ExecutorApi
    restarts: RollingRestart
    runner: RunnerApi

    async def run(self) -> None:
        """Runs its tasks until cancelled. Raises OwnershipLost, PoolFailed."""

    async def drain(self, grace_s: float) -> None:
        """Refuses new operations and waits for running ones."""

    def close(self) -> None:
        """Closes its journal."""


class OtherGateways(Protocol):
    """The other gateways of a server, which have other shards.

    Attributes:
        secret: By which they prove that they forward a call of a tenant.
        stop_all: Stops the whole server. None: each gateway is stopped by itself.
    """

    secret: str
    stop_all: Stop | None

    @property
    def shards(self) -> OtherShards:
        """The other gateways' shards, which answer calls for their caches."""

    def further_shards(self) -> Sequence[ServedShard]:
        """The shards that this gateway has now beside its first one."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway, for its extensions.

    Attributes:
        state: With the settings, the limits of answers, and the log of calls.
        api: The calls of gRPC for caches, of a caller in the same process.
        runner: The calls of gRPC for whole texts.
        admin: Those of operators. None: they would not be safe to offer.
        authenticator: None: there are no tokens.
        interceptor: Wraps each call of gRPC.
        shards: Those that the gateway has now; the one that it got first is the first.
        open_core: Makes the core of a further shard.
        stop: Stops this gateway; a second call, before it has ended, ends it at once.
        http: What other extensions do with each HTTP request, the first one outermost.
        num_http_connections: Of all extensions.
    """

    state: ServerState
    api: ExecutorApi
    runner: RunnerApi
    admin: AdminApi | None
    interceptor: CallInterceptor
    authenticator: Authenticator | None
    text: TextModel
    adapters: Adapters
    shards: Callable[[], Sequence[ServedShard]]
    open_core: Callable[[OpenShard], ServedShard]
    stop: Stop
    http: Sequence[WrapHttp]
    num_http_connections: Callable[[], int]

    def slots(self) -> list[WorkerSlot]:
        return [slot for shard in self.shards() for slot in shard.versions.slots]


class Extension:
    """An extension of one gateway. Each has what it needs of this.

    Attributes:
        calls: Returns a behaviour of gRPC that does more than the given one; see `Observing`.
        appends: Is called with each request for caches; see `ObserveAppends`.
        commits: Is called with the seconds that each commit of the journal took.
        http: See `WrapHttp`.
        launcher: See `NewLauncher`. None: the core's own start them.
        runtimes: See `RuntimeSource`. None: there is only the local one.
        journal: See `OpenJournal`. None: the core has it.
        open_home: See `OpenHome`. None: the gateway has the only shard.
        has_parent: Another process says when to stop, by `GatewayParts.stop`. Signals are ignored: service
            managers send them to all processes at once.
        listen: The address of its port, as the settings have it; "": it has none.
        port_for: What the port is for, in the log.
    """

    # The name of its entry point.
    name = ""
    calls: Observing | None = None
    appends: ObserveAppends | None = None
    commits: Callable[[float], None] | None = None
    http: WrapHttp | None = None
    launcher: NewLauncher | None = None
    runtimes: RuntimeSource | None = None
    journal: OpenJournal | None = None
    open_home: OpenHome | None = None
    has_parent = False
    listen = ""
    port_for = ""

    def connect(self, home: ServedShard, state: ServerState) -> OtherGateways | None:
        """The other gateways. `home`: the shard of `open_home`. None: there are none."""

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

    async def drain(self, grace_s: float) -> None:
        """The gateway stops, and takes no new calls: waits so long for running ones, if some are its own."""

    async def stop(self, grace_s: float) -> None:
        """Ends its requests, after running ones had this time. All executions have ended."""

    async def finish(self) -> None:
        """Called when nothing runs any more."""

    def close(self) -> None:
        """Called last."""


def find_server(config: Config) -> Callable[[], int] | None:
    """See `ExtensionSettings.open_server`. Raises ConfigError or ExtensionUnusable."""
    for name, settings in installed_extensions().items():
        if not isinstance(settings, str):
            with _naming(name):
                serve = config.of(settings).open_server(config)
            if serve is not None:
                return serve
    return None


def open_extensions(config: Config) -> list[Extension]:
    """The extensions that the settings enable, by name. Raises ConfigError or ExtensionUnusable."""
    found: list[Extension] = []
    for name, settings in installed_extensions().items():
        if isinstance(settings, str):
            _log.warning("an extension is missing", extension=name, module=settings)
            continue
        with _naming(name):
            extension: Extension | None = config.of(settings).open_extension(config)
        if extension is not None:
            extension.name = name
            found.append(extension)
    for part in _ONLY_ONE:
        names = [one.name for one in found if getattr(one, part) is not None]
        if len(names) > 1:
            # Some of them would be without effect.
            raise ExtensionUnusable(f"only one extension can have the {part}, and {' and '.join(names)} do")
    return found


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raises ExtensionUnusable for what an extension raises, but for ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise failed_extension(name, error) from error
