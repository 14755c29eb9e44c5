"""The gateway: creates its parts, connects them, and starts, drains and closes them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from quire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    executor_pb2,
    executor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
)

from service.adapters.loader import AdapterLoader, FindAdapter
from service.adapters.registry import Adapters
from service.adapters.store import AdapterStore
from service.api import admin
from service.api.executor import ExecutorApi
from service.api.grpc_services import HealthApi, add_reflection
from service.api.interceptor import CallInterceptor, Observing
from service.api.server_state import ServerState
from service.auth.authenticator import Authenticator, current_tenant, current_tenant_name
from service.auth.connections import server_options
from service.auth.tls import server_credentials
from service.caches.machine import CacheMachine
from service.caches.reservations import Limits
from service.caches.tenants import Tenant
from service.config import Config, ConfigError
from service.data_directory import data_directory
from service.dispatcher import Dispatcher
from service.journal.base import Journal
from service.journal.opening import open_configured
from service.listening import actual_address
from service.logging import get_logger
from service.memory import MemoryTrimmer
from service.metrics.collector import Sources
from service.metrics.exporter import Exporter
from service.metrics.figures import ObservedDispatcher
from service.model_names import SHIPPED_MODEL, WEIGHTLESS_MODEL
from service.pool import gpus, wire
from service.pool.launcher import Launcher
from service.pool.local import LocalLauncher
from service.pool.model_versions import SHIPPED_MODEL_DIR, ModelVersions, is_gone, model_argument
from service.pool.ray_launcher import RayLauncher
from service.pool.remote import RemoteLauncher
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.executions import Executions
from service.runtimes.loading import WeightsLoader
from service.runtimes.local import LocalRuntime
from service.runtimes.remote.spending import Spending
from service.runtimes.replacing import WeightsReplacer
from service.runtimes.runtimes_file import RuntimesFile
from service.runtimes.servicer import RunnerApi
from service.runtimes.sources import FindModel, ModelSources
from service.runtimes.weight_uploads import WeightUploads
from service.text.text_model import TextModel
from service.tracing.opening import open_tracer
from service.uploads import UploadDirectory

if TYPE_CHECKING:
    from service.openai.front import OpenAiFront

_log = get_logger(__name__)

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
EXECUTOR_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name
RUNNER_SERVICE = runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name
_HEALTH_NAMES = ("", EXECUTOR_SERVICE, RUNNER_SERVICE)
# How long streams that do not end by themselves (health watches) stay open after all calls have ended.
_FINAL_GRACE_S = 0.2
_POLL_INTERVAL_S = 0.02


class Gateway:
    """Owner of all parts of one gateway."""

    def __init__(
        self,
        config: Config,
        find_model: FindModel | None = None,
        find_adapter: FindAdapter | None = None,
    ) -> None:
        """`find_...`: finds models and adapters of the hub.

        Raises JournalUnusable, BadRuntimes or ConfigError.
        """
        self._find_model = find_model
        self._gpus = gpus.chosen(config)
        self.config = config = gpus.with_workers(config, self._gpus)
        # Limits are settings of the same names.
        limits = Limits(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Limits)})
        directory = data_directory(config)
        self.authenticator = Authenticator.of(config)
        self.caches = CacheMachine(limits)
        self.journal = self._open_journal(directory)
        configured = config.model if config.has_remote_workers else model_argument(config.model)
        versions = ModelVersions(
            configured,
            config.worker_slots,
            directory,
            self.journal.model_fingerprint,
            self.journal.bind_model,
            self.caches.weights.has_caches,
        )
        served = versions.serving.model
        if not config.has_remote_workers and is_gone(served, configured):
            gone = "what was loaded last is gone; put it back, or remove the data directory with its caches"
            raise ConfigError("model", f"{directory}/weights.json", served, gone)
        self.caches.weights.replace(versions.serving.number, continued_from=versions.continued_from)
        self.pool = Supervisor(config, versions, self._new_launcher(directory))
        self.exporter = Exporter(config.metrics_listen) if config.metrics_listen else None
        self.dispatcher = self._new_dispatcher()
        self.restarts = RollingRestart(self.pool, self.dispatcher)
        # Set when the server has to stop.
        self.stopping = asyncio.Event()
        self.adapters = Adapters(config.max_adapters)
        self.adapter_store = AdapterStore(directory, config.max_lora_bytes)
        self.adapter_loader = AdapterLoader(
            self.adapters, self.adapter_store, self.pool, self.caches, config, find_adapter
        )
        self.state = ServerState(
            config,
            versions,
            lambda cache_id: self.caches.index.weights_of(cache_id, current_tenant()),
            self.adapters,
        )
        self.state.has_recovered = len(self.caches) > 0
        self.api = ExecutorApi(self.dispatcher, self.state, self.pool, self.adapters)
        self.text = TextModel(lambda: self.state.first_ready, current_tenant_name)
        # Spending is durable if the journal is.
        self.spending = Spending(directory if self.journal.is_durable else None)
        self.weight_uploads = WeightUploads(directory, versions, config)
        self.runtimes_file = self._read_runtimes()
        self.router = self.runtimes_file.router
        self.executions = Executions(self.router, self.state)
        self.runner = RunnerApi(
            self.executions, self.router, self.state, self.runtimes_file.read_again, self.weight_uploads
        )
        self.tracer = open_tracer(config)
        self.front = self._open_front() if config.openai_listen else None
        self.health = HealthApi(_HEALTH_NAMES, self.state)
        versions.subscribe(self.health.on_change)
        versions.subscribe(self._log_ready)
        self.credentials = server_credentials(config)
        interceptor = CallInterceptor(self.state, self.authenticator, self._observing())
        self.server = grpc.aio.server(interceptors=[interceptor], options=server_options(config))
        # The stubs register each method twice. For methods registered by name, grpcio's asyncio server waits
        # for one task per method with every call: with 35 methods, a quarter of the Python calls of a Decode.
        self.server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
        # Fields of the log event "ready", until the first worker is ready.
        self._ready_fields: dict[str, str] = {}

    def _new_launcher(self, directory: Path | None) -> Launcher:
        """Raises ConfigError."""
        if self.config.launcher == "ray":
            return RayLauncher(directory, self.config, self._remove_leftovers)
        if self.config.has_remote_workers:
            return RemoteLauncher(directory, self.config, self._remove_leftovers, Path(self.config.pool))
        grace_s = self.config.orphan_grace_s if directory is not None else 0.0
        return LocalLauncher(directory, grace_s, self._remove_leftovers, self._gpus)

    def _read_runtimes(self) -> RuntimesFile:
        """Reads the runtimes file, with the local runtime as one of them. Raises BadRuntimes."""
        sources = ModelSources(SHIPPED_MODEL_DIR, self._find_model, self.weight_uploads.find)
        loader = WeightsLoader(self.pool, self.dispatcher, self.restarts, sources, self.config)
        replacer = WeightsReplacer(self.pool, self.dispatcher, self.restarts, sources, loader)
        parts = self.dispatcher, self.state, self.text, self.restarts
        local = LocalRuntime(*parts, loader, replacer, self.weight_uploads)
        path = Path(self.config.runtimes) if self.config.runtimes else None
        return RuntimesFile(path, local, self.spending)

    def _open_front(self) -> OpenAiFront:
        """Creates the HTTP server. Raises ConfigError if the libraries for it are not installed."""
        try:
            from service.openai.front import OpenAiFront  # noqa: PLC0415 - its libraries are an extra
        except ModuleNotFoundError as error:
            allowed = f"needs {error.name}, of the extra openai: `make setup` installs it"
            raise ConfigError("openai_listen", "a setting", self.config.openai_listen, allowed) from None
        parts = self.executions, self.router, self.state, self.text, self.authenticator
        return OpenAiFront(*parts, self.api.Forward, None if self.tracer is None else self.tracer.http)

    def _new_dispatcher(self) -> Dispatcher:
        parts = self.caches, self.journal, functools.partial(wire.send, self.pool.links)
        if self.exporter is None:
            return Dispatcher(*parts)
        self.journal.on_latency = self.exporter.figures.commits.add
        return ObservedDispatcher(self.exporter.figures.appends, *parts)

    def _observing(self) -> list[Observing]:
        """What counts and traces calls, if anything does. Connects metrics and the log of slow calls."""
        if self.state.call_log is not None and self.config.slow_call_ms:
            self.journal.on_latency = self.state.call_log.watching_commits(self.journal.on_latency)
        observing: list[Observing] = [] if self.tracer is None else [self.tracer.observing]
        if self.exporter is None:
            return observing
        parts = self.state, self.pool.versions, self.caches, self.adapters, self.router, self.executions
        front = self.front
        self.exporter.attach(Sources(*parts, lambda: 0 if front is None else len(front.connections)))
        return [*observing, self.exporter.figures.calls.observing]

    def _open_journal(self, directory: Path | None) -> Journal:
        """Opens the journal and recovers its caches. Raises JournalUnusable or ConfigError."""
        config, caches = self.config, self.caches
        start_s = time.monotonic()
        try:
            journal = open_configured(
                config.journal, config.journal_sync, directory, caches.recovering, caches.recovering_run
            )
        except ModuleNotFoundError as error:
            allowed = f"needs {error.name}, of the extra postgres: `make setup` installs it"
            raise ConfigError("journal", "a setting", config.journal, allowed) from None
        # Without authentication, each stored name becomes a tenant.
        tenants: dict[str, Tenant] = {}
        tenant_of = (
            self.authenticator.tenant
            if self.authenticator is not None
            else lambda name: tenants.setdefault(name, Tenant(name))
        )
        self.caches.recovered(now_s=time.monotonic(), wall_s=time.time(), tenant_of=tenant_of)
        if len(self.caches):
            took_ms = round(1e3 * (time.monotonic() - start_s))
            _log.info("recovered", caches=len(self.caches), journal=self.config.journal, took_ms=took_ms)
        return journal

    def _upload_directories(self) -> tuple[UploadDirectory, ...]:
        return self.adapter_store.directory, self.weight_uploads.directory

    def _remove_leftovers(self) -> None:
        for directory in self._upload_directories():
            directory.remove_leftovers()

    def stop(self, *, leave_workers: bool = False) -> None:
        """Starts to stop. `leave_workers`: the next gateway with this data directory can adopt them."""
        if leave_workers:
            self.pool.detach_workers()
        self.stopping.set()

    async def start(self) -> int:
        """Binds the port and starts serving. Returns the port; 0 for a Unix socket. Raises RuntimeError."""
        await self.health.update()
        # Its methods come from a table, which the type checker cannot see.
        servicer = cast(executor_pb2_grpc.ModelExecutorServiceServicer, self.api)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, self.server)
        runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(
            cast(runner_pb2_grpc.ModelRunnerServiceServicer, self.runner), self.server
        )
        names = [EXECUTOR_SERVICE, RUNNER_SERVICE, health.SERVICE_NAME]
        if admin.is_available(self.config):
            parts = self.adapter_loader, self.adapters, self.caches.adapters_in_use
            operators = cast(
                admin_pb2_grpc.AdminServiceServicer,
                admin.AdminApi(self.state, self.restarts, *parts, self.stop, self.dispatcher),
            )
            admin_pb2_grpc.add_AdminServiceServicer_to_server(operators, self.server)
            names.append(ADMIN_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        if self.config.reflection == "on":
            add_reflection(self.server, names)
        if self.credentials is None:
            port = self.server.add_insecure_port(self.config.listen)
        else:
            port = self.server.add_secure_port(self.config.listen, self.credentials)
        listen = actual_address(self.config.listen, port)
        self._ready_fields = {"listen": listen} | _first_command(self.config, listen)
        self._port = port
        await self.server.start()
        return port

    def close(self) -> None:
        """Stops the tokenizer processes and closes the journal. All other parts have stopped before."""
        self.text.close()
        self.journal.close()
        for directory in self._upload_directories():
            directory.close()
        if self.tracer is not None:
            self.tracer.close()

    async def run_workers(self) -> None:
        """Runs the workers and all background tasks until cancelled. Raises PoolFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pool.run(self.dispatcher), name="pool")
            group.create_task(self.journal.run(), name="journal")
            group.create_task(self.dispatcher.keep_time(), name="time")
            group.create_task(self.restarts.replace_outdated(self.config.drain_grace_s), name="outdated")
            group.create_task(self.adapter_loader.run(), name="adapters")
            if self.authenticator is not None:
                group.create_task(self.authenticator.watch(), name="authenticator")
            group.create_task(self.state.watch.run(), name="watch")
            group.create_task(self.state.receiver.run(), name="receiver")
            group.create_task(self.state.connections.run(self._port), name="connections")
            if self.front is not None:
                group.create_task(self.front.run(), name="front")
            if self.exporter is not None:
                group.create_task(self.exporter.run(), name="metrics")
            group.create_task(MemoryTrimmer(self.state.memory).run(), name="memory")

    async def drain(self) -> None:
        """Refuses new calls, after the lame duck period, and waits up to the grace for running ones."""
        self.state.draining = True
        await self.health.update()
        # Load balancers see NOT_SERVING and choose other servers, while this one still accepts calls.
        await asyncio.sleep(self.config.lame_duck_s)
        deadline_s = time.monotonic() + self.config.drain_grace_s
        # Executions end first: each of their tokens is a new operation, which the dispatcher would refuse.
        self.executions.drain()
        while self.executions.num_unfinished and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
        self.executions.end_all()
        self.dispatcher.start_draining()
        self.api.end_sessions()
        # Polled, because an event for this rare case would cost time with each call.
        while self.caches.operations_in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
        if self.front is not None:
            await self.front.stop(_FINAL_GRACE_S)
        await self.server.stop(_FINAL_GRACE_S)

    def _log_ready(self) -> None:
        if self._ready_fields and self.state.has_ready_worker:
            _log.info("ready", **self._ready_fields)
            self._ready_fields = {}


def _first_command(config: Config, listen: str) -> dict[str, str]:
    """A shell command to try next. Empty if callers need certificates or tokens."""
    if config.tls_cert or config.tokens:
        return {}
    program = sys.argv[0] if Path(sys.argv[0]).name == "quire" else "quire"
    command = [program, "status"]
    if config.model != WEIGHTLESS_MODEL:
        # The shipped model can only add numbers.
        command = [program, "generate", "12+34=" if config.model == SHIPPED_MODEL else "Hello"]
    if listen != Config().listen:
        command += ["--target", listen]
    return {"try_next": shlex.join(command)}
