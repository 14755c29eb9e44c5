"""The gateway: a process with its ports around the core of its shard. Starts, drains and closes its parts."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

from grpc_health.v1 import health, health_pb2_grpc
from quire.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, executor_pb2_grpc, runner_pb2, runner_pb2_grpc

from service import admin
from service.admin import AdminApi
from service.api.grpc_services import HealthApi, add_reflection, new_server
from service.api.interceptor import CallInterceptor
from service.auth.authenticator import Authenticator, current_tenant_name
from service.auth.connections import handshake_limits
from service.auth.tls import server_credentials
from service.config import Config
from service.core import Core
from service.data_directory import data_directory
from service.errors import Draining
from service.extension import Extension, GatewayParts, OtherGateways, RuntimeSource, open_extensions
from service.handshakes import Handshakes, has_spoken
from service.listening import actual_address, binding
from service.logging import drain_log, get_logger
from service.memory import keep_trimmed
from service.model_names import SHIPPED_MODEL, WEIGHTLESS_MODEL
from service.pool import gpus, pool_files
from service.runtimes.embedding import Embedder
from service.runtimes.executions import Executions
from service.runtimes.loading import WeightsLoader
from service.runtimes.local import LocalRuntime
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from service.shard import OpenShard, open_own_journal, open_shard
from service.text.sandbox import hide_memory
from service.text.text_model import TextModel

_log = get_logger(__name__)

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
EXECUTOR_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name
RUNNER_SERVICE = runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name
_HEALTH_NAMES = ("", EXECUTOR_SERVICE, RUNNER_SERVICE)
# How long streams that do not end by themselves (health watches) stay open after all calls have ended.
_FINAL_GRACE_S = 0.2
_HANDSHAKE_INTERVAL_S = 1.0
_REFUSING_POLL_S, _MOST_REFUSING_POLLS = 0.05, 10


async def open_gateway(config: Config, given: Sequence[Extension] = ()) -> Gateway:
    """Opens the journal, which can mean to wait for other gateways. Raises JournalUnusable or ConfigError.

    `given`: extensions beside those that are found.
    """
    own_gpus = gpus.chosen(config)
    config = gpus.with_workers(config, own_gpus)
    extensions = [*given, *open_extensions(config)]
    open_journal = next((one.journal for one in extensions if one.journal is not None), open_own_journal)
    open_home = next((one.open_home for one in extensions if one.open_home is not None), None)
    if open_home is not None:
        opened = await open_home(open_journal)
    else:
        opened = await open_shard(config, open_journal, data_directory(config))
    return Gateway(config, opened, extensions, own_gpus)


class Gateway:
    """Owner of all parts of one gateway."""

    def __init__(
        self,
        config: Config,
        opened: OpenShard,
        extensions: Sequence[Extension],
        own_gpus: Sequence[str] = (),
    ) -> None:
        """See `open_gateway`. `opened`: the first shard. `own_gpus`: of this machine. Raises ConfigError."""
        self.config = config
        self.authenticator = Authenticator.of(config)
        self._tenant_of = None if self.authenticator is None else self.authenticator.tenant
        self.extensions = extensions
        # What workers of other hosts dial, for all shards. An extension that starts them has its own.
        self._worker_port = None
        if config.pool_listen and not any(one.launcher is not None for one in extensions):
            self._worker_port = pool_files.worker_port(config.pool_listen, Path(config.pool))
        self.core = Core(config, opened, self._tenant_of, extensions, own_gpus, self._worker_port)
        self.state = self.core.state
        self._others = self._connect()
        # Set when the server has to stop.
        self.stopping = asyncio.Event()
        self.text = TextModel(lambda: self.state.first_ready, current_tenant_name)
        others = next((one.runtimes for one in extensions if one.runtimes is not None), None)
        self.runner = self.core.runner = self._new_runner(self.core, others)
        observing = [one.calls for one in extensions if one.calls is not None]
        self._interceptor = CallInterceptor(self.state, self.authenticator, observing)
        self._admin = None
        if admin.is_available(config):
            self._admin = self._new_admin(None if others is None else others.read_again)
        self._attach_extensions()
        self.health = HealthApi(_HEALTH_NAMES, self.state)
        self.core.versions.subscribe(self.health.on_change)
        self.core.versions.subscribe(self._log_ready)
        self.credentials = server_credentials(config)
        self.server = new_server(config, self._interceptor)
        # Fields of the log event "ready", until the first worker is ready.
        self._ready_fields: dict[str, str] = {}

    def _connect(self) -> OtherGateways | None:
        """Connects to the other gateways, so that this one answers for all shards. None: there are none."""
        found = (one.connect(self.core, self.state) for one in self.extensions)
        others = next((one for one in found if one is not None), None)
        if others is not None:
            self.state.has_other_gateways = True
            self.core.api.other_shards = others.shards
            if self.authenticator is not None:
                self.authenticator.hop_secret = others.secret
        return others

    def _open_core(self, opened: OpenShard) -> Core:
        core = Core(self.config, opened, self._tenant_of, self.extensions, worker_port=self._worker_port)
        core.count_with(self.core)
        core.runner = self._new_runner(core)
        core.runner.router.on_end = self.runner.router.on_end
        return core

    def _new_admin(self, read_runtimes: Callable[[str], Awaitable[int]] | None) -> AdminApi:
        core, others = self.core, self._others
        stop_all = None if others is None else others.stop_all
        further = tuple if others is None else others.further_shards
        return AdminApi(
            self.state,
            core.adapter_loader,
            core.adapters,
            core.caches.adapters_in_use,
            stop_all or self.stop,
            lambda: [core.restarts, *(shard.restarts for shard in further())],
            self.runner.router,
            read_runtimes,
            core.weight_uploads,
        )

    def _new_runner(self, core: Core, runtimes: RuntimeSource | None = None) -> RunnerApi:
        """The API that runs whole texts on a shard, or on other `runtimes`. Raises ConfigError."""
        local = self._local_runtime(core)
        router = Router([local]) if runtimes is None else runtimes.open_router(local, core.values)
        executions = Executions(router, core.state, core.caches.index.idempotency)
        embedder = Embedder(core.state, self.text, core.api.BatchForward)
        return RunnerApi(executions, router, core.state, embedder, core.api.other_shards)

    def _local_runtime(self, core: Core) -> LocalRuntime:
        uploads = core.weight_uploads
        loader = WeightsLoader(core.pool, core.dispatcher, core.restarts, uploads.find, self.config)
        parts = core.dispatcher, core.state, self.text, core.restarts
        return LocalRuntime(*parts, loader, uploads)

    def _attach_extensions(self) -> None:
        """Raises ConfigError."""
        core, extensions, others = self.core, self.extensions, self._others
        further = others.further_shards if others is not None else tuple
        parts = GatewayParts(
            state=self.state,
            api=core.api,
            runner=self.runner,
            admin=self._admin,
            interceptor=self._interceptor,
            authenticator=self.authenticator,
            text=self.text,
            adapters=core.adapters,
            shards=lambda: [core, *further()],
            open_core=self._open_core,
            stop=self.stop_or_kill,
            http=[one.http for one in extensions if one.http is not None],
            num_http_connections=lambda: sum(one.num_connections for one in extensions),
        )
        for extension in extensions:
            extension.attach(parts)

    def stop(self, *, leave_workers: bool = False) -> None:
        """Starts to stop. `leave_workers`: the next gateway with this data directory can adopt them."""
        if leave_workers:
            self.core.pool.detach_workers()
        self.stopping.set()

    def stop_or_kill(self, *, leave_workers: bool) -> None:
        """As `stop`; the second time this process ends at once."""
        if self.stopping.is_set():
            _log.warning("stopping at once")
            if not leave_workers:
                self.core.pool.kill()
            drain_log()
            signal.raise_signal(signal.SIGKILL)
        self.stop(leave_workers=leave_workers)

    async def start(self) -> int:
        """Binds the port and starts serving. Returns the port; 0 for a Unix socket. Raises CannotListen."""
        # On kernels without Landlock, from helper processes of this user.
        hide_memory()
        # Its methods come from a table, which the type checker cannot see.
        servicer = cast(executor_pb2_grpc.ModelExecutorServiceServicer, self.core.api)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, self.server)
        runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(
            cast(runner_pb2_grpc.ModelRunnerServiceServicer, self.runner), self.server
        )
        names = [EXECUTOR_SERVICE, RUNNER_SERVICE, health.SERVICE_NAME]
        if self._admin is not None:
            api = cast(admin_pb2_grpc.AdminServiceServicer, self._admin)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(api, self.server)
            names.append(ADMIN_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        add_reflection(self.server, names)
        with binding(self.config.listen):
            if self.credentials is None:
                port = self.server.add_insecure_port(self.config.listen)
            else:
                port = self.server.add_secure_port(self.config.listen, self.credentials)
        listen = actual_address(self.config.listen, port)
        self._ready_fields = {"listen": listen} | _first_command(self.config, listen)
        self._port = port
        await self.server.start()
        return port

    async def finish(self) -> None:
        """Called when nothing runs any more, before `close`."""
        await self.runner.router.close()
        for extension in self.extensions:
            await extension.finish()

    def close(self) -> None:
        """Stops the tokenizer processes and closes the journal. All other parts have stopped before."""
        self.text.close()
        self.core.close()
        for extension in self.extensions:
            extension.close()

    async def run_workers(self) -> None:
        """Runs the workers and all background tasks until cancelled. Raises PoolFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.core.run(), name="core")
            if self.authenticator is not None:
                group.create_task(self.authenticator.watch(), name="authenticator")
            group.create_task(self.state.watch.run(), name="watch")
            group.create_task(self.state.receiver.run(), name="receiver")
            if self._port > 1:
                handshakes = Handshakes(
                    self._port, has_spoken, handshake_limits(self.config), self.config.max_connections
                )
                self.state.connections = handshakes
                group.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S), name="handshakes")
            for extension in self.extensions:
                group.create_task(extension.run(), name=type(extension).__name__)
            group.create_task(keep_trimmed(self.state.memory), name="memory")

    async def drain(self) -> None:
        """Refuses new calls, after the lame duck period, and waits up to the grace for running ones."""
        self.state.draining = True
        self.health.on_change()
        # Load balancers see NOT_SERVING and choose other servers, while this one still accepts calls.
        await asyncio.sleep(self.config.lame_duck_s)
        deadline_s = time.monotonic() + self.config.drain_grace_s
        # Executions end first: each of their tokens is a new operation, which the dispatcher would refuse.
        await self.runner.executions.drain(self.config.drain_grace_s)
        self.core.dispatcher.start_draining()
        self.core.api.end_sessions()
        left_s = deadline_s - time.monotonic()
        await asyncio.gather(self.core.drain(left_s), *(one.drain(left_s) for one in self.extensions))
        await self._refuse_waiting_calls()
        for extension in self.extensions:
            await extension.stop(_FINAL_GRACE_S)
        await self.server.stop(_FINAL_GRACE_S)

    async def fail(self) -> None:
        """Ends after a failure: refuses new calls, and tells those in flight, which nobody will answer."""
        self.state.draining = True
        self.health.on_change()
        # Executions end first, or their samples would fail. The next gateway resumes kept ones.
        await self.runner.executions.drain(0)
        self.core.dispatcher.start_draining()
        self.core.dispatcher.close(Draining)
        await self._refuse_waiting_calls()
        await self.server.stop(_FINAL_GRACE_S)

    async def _refuse_waiting_calls(self) -> None:
        """Refuses calls that gRPC has not handed over yet. A stopping server would drop them, with CANCELLED.

        Callers that were refused wait before they try again.
        """
        refusals, seen, polls = self.state.call_log.refusals, -1, 0
        while refusals["DRAINING"] != seen and polls < _MOST_REFUSING_POLLS:
            seen, polls = refusals["DRAINING"], polls + 1
            await asyncio.sleep(_REFUSING_POLL_S)

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
        # The adder can only add numbers.
        command = [program, "generate", "12+34=" if config.model == SHIPPED_MODEL else "Hello"]
    if listen != Config().listen:
        command += ["--target", listen]
    return {"try_next": shlex.join(command)}
