"""The core of a shard: its caches and journal, its workers, and what answers calls for these caches.

What belongs to the process, such as ports, authentication and metrics, is in `gateway`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

from service.adapters.loader import AdapterLoader
from service.adapters.registry import Adapters
from service.adapters.store import AdapterStore
from service.api.executor import ExecutorApi
from service.api.server_state import ServerState
from service.auth.authenticator import current_tenant
from service.caches.tenants import Tenant
from service.completion import wait_until
from service.config import Config
from service.dispatcher import Dispatcher
from service.extension import Extension
from service.journal.clock_settings import note_clock_settings
from service.journal.values import StoredValues
from service.pool import wire
from service.pool.launcher import Launcher
from service.pool.local import LocalLauncher
from service.pool.model_versions import ModelVersions, is_gone, model_argument
from service.pool.remote import RemoteLauncher
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.pool.worker_port import WorkerPort
from service.runtimes.servicer import RunnerApi
from service.runtimes.weight_uploads import DIRECTORY, WeightUploads
from service.settings import ConfigError
from service.shard import OpenShard


class Core:
    """Owner of all parts of one shard.

    Attributes:
        runner: What runs whole texts on its caches. Set by the gateway.
    """

    runner: RunnerApi

    def __init__(
        self,
        config: Config,
        opened: OpenShard,
        tenant_of: Callable[[str], Tenant] | None = None,
        extensions: Sequence[Extension] = (),
        gpus: Sequence[str] = (),
        worker_port: WorkerPort | None = None,
    ) -> None:
        """`tenant_of`: the owner of recovered caches. `extensions`: some observe appends and commits.

        gpus: for the workers on this machine. worker_port: what other workers dial.

        Raises ConfigError.
        """
        self.config = config
        self.shard, directory = opened.shard, opened.directory
        self.caches, self.journal = opened.caches, opened.journal
        self._recovered(tenant_of)
        self.values = StoredValues(self.journal, self.caches.ledger)
        configured = config.model if config.has_remote_workers else model_argument(config.model)
        self.versions = versions = ModelVersions(
            configured,
            self.shard.workers(config.worker_slots),
            self.values,
            self.caches.weights.has_caches,
            directory and directory.resolve() / DIRECTORY,
        )
        served = versions.serving.model
        if not config.has_remote_workers and is_gone(served, configured):
            gone = "what was loaded last is gone; put it back, or remove the data directory with its caches"
            raise ConfigError("model", f"the journal in {directory}", served, gone)
        self.caches.weights.replace(versions.serving.number, continued_from=versions.serving.continued_from)
        self.pool = Supervisor(config, versions, self._new_launcher(opened, gpus, extensions, worker_port))
        observing = [one.appends for one in extensions if one.appends is not None]
        commits = [one.commits for one in extensions if one.commits is not None]
        send = functools.partial(wire.send, self.pool.links)
        self.dispatcher = Dispatcher(self.caches, self.journal, send, observing=observing, commits=commits)
        self.restarts = RollingRestart(self.pool)
        self.adapters = Adapters(config.max_adapters)
        self.adapter_store = AdapterStore(directory, config.max_lora_bytes, self.values)
        self.adapter_loader = AdapterLoader(self.adapters, self.adapter_store, self.pool, self.caches, config)
        self.caches.parts.context.digest_of = self.adapters.digest_of
        self.weight_uploads = WeightUploads(directory, versions, config)
        self.state = ServerState(
            config,
            versions,
            self.adapters,
            lambda request_id: self.caches.index.made_with(request_id, current_tenant()),
        )
        self.state.has_recovered = len(self.caches) > 0
        self.api = ExecutorApi(self.dispatcher, self.state, self.pool, self.adapters)

    def _recovered(self, tenant_of: Callable[[str], Tenant] | None) -> None:
        # Without authentication, each stored name becomes a tenant.
        tenants: dict[str, Tenant] = {}
        if tenant_of is None:
            tenant_of = lambda name: tenants.setdefault(name, Tenant(name))  # noqa: E731
        self.caches.recovered(now_s=time.monotonic(), wall_s=time.time(), tenant_of=tenant_of)

    def _new_launcher(
        self,
        opened: OpenShard,
        gpus: Sequence[str],
        extensions: Sequence[Extension],
        worker_port: WorkerPort | None,
    ) -> Launcher:
        """Raises ConfigError."""
        directory = opened.directory
        for extension in extensions:
            if extension.launcher is not None:
                return extension.launcher(self.config, directory)
        if worker_port is not None:
            return RemoteLauncher(directory, self.config, worker_port, opened.lease)
        grace_s = self.config.orphan_grace_s if directory is not None else 0.0
        return LocalLauncher(directory, grace_s, gpus)

    def count_with(self, first: Core) -> None:
        """Counts where the first core of this process does, so that figures stay when this one ends.

        What calls hold has one limit, whichever core answers them.
        """
        self.state.budgets = first.state.budgets
        self.versions.starts = first.versions.starts
        self.caches.parts.context.counts = first.caches.parts.context.counts
        self.versions.subscribe(first.versions.changed)

    async def run(self) -> None:
        """Runs the workers and the tasks of the shard until cancelled. Raises PoolFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pool.run(self.dispatcher), name="pool")
            group.create_task(self.journal.run(), name="journal")
            group.create_task(note_clock_settings(self.values), name="clock")
            group.create_task(self.dispatcher.keep_time(), name="time")
            group.create_task(self.dispatcher.end_leases(), name="leases")
            group.create_task(self.restarts.replace_outdated(self.config.drain_grace_s), name="outdated")
            group.create_task(self.adapter_loader.run(), name="adapters")

    async def drain(self, grace_s: float) -> None:
        """Refuses new operations and waits for running ones."""
        self.dispatcher.start_draining()
        await wait_until(lambda: not self.caches.operations_in_flight, grace_s)

    def close(self) -> None:
        """Closes the journal. All other parts have stopped before."""
        self.values.close()
        self.journal.close()
        self.adapter_store.directory.close()
        self.weight_uploads.directory.close()
