"""The gateway: a process with its ports around the core of its shard. Starts, drains and closes its parts."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from pathlib import Path
from typing import Any, cast

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

from service.adapters.loader import FindAdapter
from service.api import admin
from service.api.grpc_services import HealthApi, add_reflection
from service.api.interceptor import CallInterceptor, Observing
from service.auth.authenticator import Authenticator, current_tenant_name
from service.auth.connections import handshake_limits, server_options
from service.auth.tls import server_credentials
from service.config import Config
from service.core import AnsweringCore, Core, OpenShard, open_alone, open_leased
from service.data_directory import data_directory
from service.extension import GatewayParts, open_extensions
from service.listening import actual_address, binding
from service.logging import get_logger
from service.memory import keep_trimmed
from service.model_names import SHIPPED_MODEL, SHIPPED_MODEL_DIR, WEIGHTLESS_MODEL
from service.pool import gpus, pool_files
from service.runtimes.executions import Executions
from service.runtimes.loading import WeightsLoader
from service.runtimes.local import LocalRuntime
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from service.runtimes.sources import FindModel, ModelSources
from service.shards.forwarding import Forwarding
from service.shards.ids import Shard
from service.shards.keeper import Keeper, RunningCore
from service.shards.leases import Lease, Leases
from service.shards.one_host import Membership, stop_parent
from service.shards.operators import OperatorCallsOfAll
from service.shards.peers import Addresses, PeerInterceptor, Peers
from service.text.sandbox import hide_memory
from service.text.text_model import TextModel
from workers.common.handshakes import Handshakes, has_spoken

_log = get_logger(__name__)

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
EXECUTOR_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name
RUNNER_SERVICE = runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name
_HEALTH_NAMES = ("", EXECUTOR_SERVICE, RUNNER_SERVICE)
# How long streams that do not end by themselves (health watches) stay open after all calls have ended.
_FINAL_GRACE_S = 0.2
_POLL_INTERVAL_S = 0.02
_HANDSHAKE_INTERVAL_S = 1.0
_REFUSING_POLL_S, _MOST_REFUSING_POLLS = 0.05, 10


class Gateway:
    """Owner of all parts of one gateway."""

    def __init__(
        self,
        config: Config,
        find_model: FindModel | None = None,
        find_adapter: FindAdapter | None = None,
        member: Membership | None = None,
        cluster: tuple[Keeper, OpenShard] | None = None,
    ) -> None:
        """`member`: of several gateways of this host. `cluster`: of several hosts, with the home shard.

        `find_...`: finds models and adapters of the hub.

        Raises JournalUnusable or ConfigError.
        """
        self._find_model = find_model
        self._gpus = own_gpus = gpus.chosen(config)
        self.config = config = gpus.with_workers(config, own_gpus)
        self._keeper: Keeper | None = None
        self.authenticator = Authenticator.of(config)
        if cluster is not None:
            self._keeper, opened = cluster
        elif member is not None:
            opened = open_alone(config, member.shard, member.directory)
        else:
            opened = open_alone(config, Shard(), data_directory(config))
        self._find_adapter = find_adapter
        self._tenant_of = None if self.authenticator is None else self.authenticator.tenant
        self.extensions = open_extensions(config)
        self.core = Core(config, opened, self._tenant_of, self.extensions, find_adapter, own_gpus)
        self.state = self.core.state
        self._member = member
        self._forwarding = self._connect()
        # Set when the server has to stop.
        self.stopping = asyncio.Event()
        self.text = TextModel(lambda: self.state.first_ready, current_tenant_name)
        others = next((one.runtimes for one in self.extensions if one.runtimes is not None), None)
        local, directory = self._local_runtime(), opened.directory if self.core.journal.is_durable else None
        self.router = Router([local]) if others is None else others.open_router(local, directory)
        self.executions = Executions(self.router, self.state)
        self.runner = RunnerApi(
            self.executions,
            self.router,
            self.state,
            None if others is None else others.read_again,
            self.core.weight_uploads,
        )
        self._attach_extensions()
        self.health = HealthApi(_HEALTH_NAMES, self.state)
        self.core.versions.subscribe(self.health.on_change)
        self.core.versions.subscribe(self._log_ready)
        self.credentials = server_credentials(config)
        parts = self.state, self.authenticator, self._observing()
        self.server = _new_server(config, CallInterceptor(*parts))
        # For the other gateways.
        self._peer_server: grpc.aio.Server | None = None
        if self._forwarding is not None:
            self._peer_server = _new_server(config, PeerInterceptor(self._forwarding.secret, *parts))
        # Fields of the log event "ready", until the first worker is ready.
        self._ready_fields: dict[str, str] = {}

    def _connect(self) -> Forwarding | None:
        """Lets this gateway answer for all shards, with the help of the others. None: there are none."""
        config = self.config
        if self._member is not None:
            # They share a port.
            addresses = Addresses(dict(enumerate(self._member.addresses)))
            peers = Peers(config, self._member.secret)
        elif self._keeper is not None:
            addresses, pool = self._keeper.addresses, Path(config.pool)
            peers = Peers(config, pool_files.secret(pool), pool_files.channel_credentials(pool))
        else:
            return None
        forwarding = Forwarding(config, self.core.shard, addresses, peers, self.state.answers)
        self.core.api.elsewhere = forwarding
        if self.authenticator is not None:
            self.authenticator.hop_secret = peers.secret
        return forwarding

    async def _open_core(self, shard: Shard, lease: Lease, leases: Leases) -> RunningCore:
        """The core of a further shard, which answers from now on."""
        assert self._forwarding is not None
        opened = await open_leased(self.config, shard, lease, leases)
        core = Core(self.config, opened, self._tenant_of, self.extensions, self._find_adapter)
        # Of the process: the limit, and what is counted, also after the shard is given back.
        core.state.answers = self.state.answers
        core.versions.starts = self.core.versions.starts
        core.caches.parts.context.counts = self.core.caches.parts.context.counts
        core.versions.subscribe(self.core.versions.changed)
        return AnsweringCore(core, self._forwarding)

    def _local_runtime(self) -> LocalRuntime:
        core = self.core
        sources = ModelSources(SHIPPED_MODEL_DIR, self._find_model, core.weight_uploads.find)
        loader = WeightsLoader(core.pool, core.dispatcher, core.restarts, sources, self.config)
        parts = core.dispatcher, self.state, self.text, core.restarts
        return LocalRuntime(*parts, loader, core.weight_uploads, self._gpus)

    def _attach_extensions(self) -> None:
        """Raises ConfigError."""
        core, extensions = self.core, self.extensions
        further: dict[int, Any] = {} if self._forwarding is None else self._forwarding.cores
        parts = GatewayParts(
            state=self.state,
            api=core.api,
            authenticator=self.authenticator,
            text=self.text,
            executions=self.executions,
            router=self.router,
            adapters=core.adapters,
            shards=lambda: [core, *further.values()],
            http=[one.http for one in extensions if one.http is not None],
            num_http_connections=lambda: sum(one.num_connections for one in extensions),
        )
        for extension in extensions:
            extension.attach(parts)

    def _observing(self) -> list[Observing]:
        """What extensions do with each call. Connects the log of slow calls."""
        if self.config.slow_call_ms:
            self.core.journal.on_latency += (self.state.call_log.committed,)
        return [one.calls for one in self.extensions if one.calls is not None]

    def stop(self, *, leave_workers: bool = False) -> None:
        """Starts to stop. `leave_workers`: the next gateway with this data directory can adopt them."""
        if leave_workers:
            self.core.pool.detach_workers()
        self.stopping.set()

    async def start(self) -> int:
        """Binds the port and starts serving. Returns the port; 0 for a Unix socket. Raises CannotListen."""
        # On kernels without Landlock, from helper processes of this user.
        hide_memory()
        await self.health.update()
        # Its methods come from a table, which the type checker cannot see.
        servicer = cast(executor_pb2_grpc.ModelExecutorServiceServicer, self.core.api)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, self.server)
        if self._peer_server is not None:
            executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, self._peer_server)
        runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(
            cast(runner_pb2_grpc.ModelRunnerServiceServicer, self.runner), self.server
        )
        names = [EXECUTOR_SERVICE, RUNNER_SERVICE, health.SERVICE_NAME]
        if admin.is_available(self.config):
            core = self.core
            parts = core.adapter_loader, core.adapters, core.caches.adapters_in_use
            stop = self.stop if self._member is None else stop_parent
            calls = core.operator_calls
            if self._forwarding is not None:
                calls = OperatorCallsOfAll(self._forwarding, calls)
            api = cast(admin_pb2_grpc.AdminServiceServicer, admin.AdminApi(self.state, *parts, stop, calls))
            for server in filter(None, (self.server, self._peer_server)):
                admin_pb2_grpc.add_AdminServiceServicer_to_server(api, server)
            names.append(ADMIN_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        add_reflection(self.server, names)
        with binding(self.config.listen):
            if self.credentials is None:
                port = self.server.add_insecure_port(self.config.listen)
            else:
                port = self.server.add_secure_port(self.config.listen, self.credentials)
        if self._peer_server is not None:
            self._listen_for_peers(self._peer_server)
            await self._peer_server.start()
        listen = actual_address(self.config.listen, port)
        self._ready_fields = {"listen": listen} | _first_command(self.config, listen)
        self._port = port
        await self.server.start()
        return port

    async def finish(self) -> None:
        """Called when nothing runs any more, before `close`."""
        await self.router.close()
        for extension in self.extensions:
            await extension.finish()

    def close(self) -> None:
        """Stops the tokenizer processes and closes the journal. All other parts have stopped before."""
        self.text.close()
        self.core.close()
        for extension in self.extensions:
            extension.close()

    def _listen_for_peers(self, server: grpc.aio.Server) -> None:
        """Raises CannotListen."""
        if self._member is not None:
            address = self._member.addresses[self._member.shard.index]
            with binding(address):
                server.add_insecure_port(address)
        else:
            credentials = pool_files.server_credentials(Path(self.config.pool))
            with binding(self.config.peer_listen):
                server.add_secure_port(self.config.peer_listen, credentials)

    async def run_workers(self) -> None:
        """Runs the workers and all background tasks until cancelled. Raises PoolFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.core.run(), name="core")
            if self._keeper is not None:
                group.create_task(self._keeper.run(self._open_core), name="shards")
            if self.authenticator is not None:
                group.create_task(self.authenticator.watch(), name="authenticator")
            group.create_task(self.state.watch.run(), name="watch")
            group.create_task(self.state.receiver.run(), name="receiver")
            group.create_task(self.state.connections.run(self._port), name="connections")
            if self._port > 1:
                handshakes = Handshakes(self._port, has_spoken, handshake_limits(self.config))
                group.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S), name="handshakes")
            for extension in self.extensions:
                group.create_task(extension.run(), name=type(extension).__name__)
            group.create_task(keep_trimmed(self.state.memory), name="memory")

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
        self.core.dispatcher.start_draining()
        if self._forwarding is not None:
            self._forwarding.is_draining = True
        self.core.api.end_sessions()
        if self._keeper is not None:
            # For the next owner of the shard.
            self.core.pool.detach_workers()
            await self._keeper.drain()
        await self.core.drain(deadline_s - time.monotonic())
        while self._forwarding is not None and self._forwarding.in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
        await self._refuse_waiting_calls()
        for extension in self.extensions:
            await extension.stop(_FINAL_GRACE_S)
        await self.stop_servers(_FINAL_GRACE_S)

    async def fail(self) -> None:
        """Ends after a failure: refuses new calls, and sends the answers that there are."""
        self.state.draining = True
        await self.health.update()
        await self._refuse_waiting_calls()
        await self.stop_servers(_FINAL_GRACE_S)

    async def stop_servers(self, grace_s: float) -> None:
        """Ends the calls of clients and of other gateways, and the connections to those."""
        await self.server.stop(grace_s)
        if self._peer_server is not None:
            await self._peer_server.stop(grace_s)
        if self._forwarding is not None:
            await self._forwarding.close()

    async def _refuse_waiting_calls(self) -> None:
        """Those that gRPC has not handed over yet. When the server stops it would drop them, with CANCELLED.

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


def _new_server(config: Config, interceptor: CallInterceptor) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=[interceptor], options=server_options(config))
    # The stubs register each method twice. For methods registered by name, grpcio's asyncio server waits
    # for one task per method with every call: with 35 methods, a quarter of the Python calls of a Decode.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
    return server


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
