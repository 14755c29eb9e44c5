"""The core of a shard: its caches and journal, its workers, and what answers calls for these caches.

What belongs to the process, such as ports, authentication and metrics, is in `gateway`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.adapters.loader import AdapterLoader, FindAdapter
from service.adapters.registry import Adapters
from service.adapters.store import AdapterStore
from service.api.admin import OperatorCalls
from service.api.elsewhere import RunHere
from service.api.executor import ExecutorApi
from service.api.server_state import ServerState
from service.auth.authenticator import current_tenant
from service.caches.machine import CacheMachine
from service.caches.reservations import Limits
from service.caches.tenants import Tenant
from service.config import Config, ConfigError, needing_extra
from service.dispatcher import Dispatcher
from service.extension import Extension
from service.journal.base import Journal
from service.journal.opening import open_configured
from service.logging import get_logger
from service.pool import wire
from service.pool.gpus import Gpu
from service.pool.launcher import Launcher
from service.pool.local import LocalLauncher
from service.pool.model_versions import ModelVersions, is_gone, model_argument
from service.pool.remote import RemoteLauncher
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.weight_uploads import WeightUploads
from service.shards.forwarding import Forwarding
from service.shards.ids import Shard
from service.shards.leases import Lease, Leases
from service.uploads import UploadDirectory

_log = get_logger(__name__)
_POLL_INTERVAL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class OpenShard:
    """What a core begins with: its journal, and the caches that were read from it."""

    shard: Shard
    caches: CacheMachine
    journal: Journal
    # Where further state is. None: nothing else survives the process.
    directory: Path | None = None
    # By which its workers know the gateways of the shard. None: by the directory.
    lease: Lease | None = None


def _new_caches(config: Config, shard: Shard) -> CacheMachine:
    # Limits are settings of the same names.
    limits = Limits(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Limits)})
    return CacheMachine(limits, new_cache_id=shard.new_cache_id)


def open_alone(config: Config, shard: Shard, directory: Path | None) -> OpenShard:
    """Opens a shard that only this host has. Blocks. Raises JournalUnusable or ConfigError."""
    caches, start_s = _new_caches(config, shard), time.monotonic()
    with needing_extra("postgres", "journal", config.journal):
        journal = open_configured(
            config.journal, config.journal_sync, directory, caches.recovering, caches.recovering_run
        )
    _log_recovered(config, shard, caches, start_s)
    return OpenShard(shard, caches, journal, directory)


async def open_leased(config: Config, shard: Shard, lease: Lease, leases: Leases) -> OpenShard:
    """Opens a shard of several hosts. Raises JournalUnusable or DatabaseFailed."""
    from service.journal.postgres import PostgresJournal  # noqa: PLC0415 - its driver is an extra
    from service.postgres.database import Database  # noqa: PLC0415

    caches, start_s = _new_caches(config, shard), time.monotonic()
    database = Database(config.journal)
    journal = PostgresJournal(database, leases, lease)
    try:
        await journal.recover(caches.recovering, caches.recovering_run)
    except BaseException:
        database.terminate()
        raise
    _log_recovered(config, shard, caches, start_s)
    return OpenShard(shard, caches, journal, lease=lease)


def _log_recovered(config: Config, shard: Shard, caches: CacheMachine, start_s: float) -> None:
    if number := len(caches.ledger):
        took_ms = round(1e3 * (time.monotonic() - start_s))
        named = {"shard": shard.index} if shard.count > 1 else {}
        _log.info("recovered", caches=number, journal=config.journal, took_ms=took_ms, **named)


class Core:
    """Owner of all parts of one shard."""

    def __init__(
        self,
        config: Config,
        opened: OpenShard,
        tenant_of: Callable[[str], Tenant] | None = None,
        extensions: Sequence[Extension] = (),
        find_adapter: FindAdapter | None = None,
        gpus: Sequence[Gpu] = (),
    ) -> None:
        """`tenant_of`: the owner of recovered caches. `extensions`: some observe appends and commits.

        gpus: for the workers on this machine.

        Raises ConfigError.
        """
        self.config = config
        self.shard, directory, lease = opened.shard, opened.directory, opened.lease
        self.caches, self.journal = opened.caches, opened.journal
        if lease is not None:
            self.caches.admission.lease = lease
        self._recovered(tenant_of)
        configured = config.model if config.has_remote_workers else model_argument(config.model)
        self.versions = versions = ModelVersions(
            configured,
            self.shard.workers(config.worker_slots),
            directory,
            self.journal.model_fingerprint,
            self.journal.bind_model,
            self.caches.weights.has_caches,
        )
        served = versions.serving.model
        if not config.has_remote_workers and is_gone(served, configured):
            gone = "what was loaded last is gone; put it back, or remove the data directory with its caches"
            raise ConfigError("model", f"{directory}/weights.json", served, gone)
        self.caches.weights.replace(versions.serving.number, continued_from=versions.serving.continued_from)
        self.pool = Supervisor(config, versions, self._new_launcher(directory, lease, gpus, extensions))
        observing = [one.appends for one in extensions if one.appends is not None]
        self.journal.on_latency += tuple(one.commits for one in extensions if one.commits is not None)
        send = functools.partial(wire.send, self.pool.links)
        self.dispatcher = Dispatcher(self.caches, self.journal, send, observing=observing)
        self.restarts = RollingRestart(self.pool)
        self.adapters = Adapters(config.max_adapters)
        self.adapter_store = AdapterStore(directory, config.max_lora_bytes)
        self.adapter_loader = AdapterLoader(
            self.adapters,
            self.adapter_store,
            self.pool,
            self.caches,
            config,
            find_adapter,
            self.caches.adapter_contents(),
        )
        self.caches.parts.context.digest_of = self.adapters.digest_of
        self.weight_uploads = WeightUploads(directory, versions, config)
        self.state = ServerState(
            config,
            versions,
            lambda cache_id: self.caches.index.weights_of(cache_id, current_tenant()),
            self.adapters,
            lambda request_id: self.caches.index.creation_of(request_id, current_tenant()),
        )
        self.state.has_recovered = len(self.caches) > 0
        self.api = ExecutorApi(self.dispatcher, self.state, self.pool, self.adapters)
        self.operator_calls = OperatorCalls(self.state, self.restarts, self.dispatcher)

    def _recovered(self, tenant_of: Callable[[str], Tenant] | None) -> None:
        # Without authentication, each stored name becomes a tenant.
        tenants: dict[str, Tenant] = {}
        if tenant_of is None:
            tenant_of = lambda name: tenants.setdefault(name, Tenant(name))  # noqa: E731
        self.caches.recovered(now_s=time.monotonic(), wall_s=time.time(), tenant_of=tenant_of)

    def _new_launcher(
        self,
        directory: Path | None,
        lease: Lease | None,
        gpus: Sequence[Gpu],
        extensions: Sequence[Extension],
    ) -> Launcher:
        """Raises ConfigError."""
        for extension in extensions:
            if extension.launcher is not None:
                return extension.launcher(self.config, directory, self._remove_leftovers)
        if self.config.has_remote_workers:
            pool = Path(self.config.pool)
            return RemoteLauncher(directory, self.config, self._remove_leftovers, pool, lease)
        grace_s = self.config.orphan_grace_s if directory is not None else 0.0
        return LocalLauncher(directory, grace_s, self._remove_leftovers, gpus)

    def _upload_directories(self) -> tuple[UploadDirectory, ...]:
        return self.adapter_store.directory, self.weight_uploads.directory

    def _remove_leftovers(self) -> None:
        for directory in self._upload_directories():
            directory.remove_leftovers()

    async def run(self) -> None:
        """Runs the workers and the tasks of the shard until cancelled. Raises PoolFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pool.run(self.dispatcher), name="pool")
            group.create_task(self.journal.run(), name="journal")
            group.create_task(self.dispatcher.keep_time(), name="time")
            group.create_task(self.restarts.replace_outdated(self.config.drain_grace_s), name="outdated")
            group.create_task(self.adapter_loader.run(), name="adapters")

    async def drain(self, grace_s: float) -> None:
        """Refuses new operations and waits for running ones."""
        self.dispatcher.start_draining()
        deadline_s = time.monotonic() + grace_s
        # Polled, because an event for this rare case would cost time with each call.
        while self.caches.operations_in_flight and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Closes the journal. All other parts have stopped before."""
        self.journal.close()
        for directory in self._upload_directories():
            directory.close()


class AnsweringCore:
    """The core of a further shard of a gateway. Calls reach it from its creation until it drains."""

    def __init__(self, core: Core, forwarding: Forwarding) -> None:
        self._core = core
        self._forwarding = forwarding
        self.caches, self.versions = core.caches, core.versions
        self.run_here: RunHere = core.api.run_here
        self.operator_calls = core.operator_calls
        forwarding.cores[core.shard.index] = self

    async def run(self) -> None:
        """Runs until cancelled, then gives the shard back. Raises OwnershipLost, PoolFailed."""
        try:
            await self._core.run()
        finally:
            self._forwarding.cores.pop(self._core.shard.index, None)

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls and waits for running ones. The workers keep their KV for the next owner."""
        self._core.pool.detach_workers()
        await self._core.drain(grace_s)

    def close(self) -> None:
        """Closes what is left."""
        self._core.dispatcher.close()
        self._core.close()
