"""One of several gateways: answers calls for all shards, on the clients' port and on a port for gateways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import grpc
from quire.v1 import executor_pb2_grpc, runner_pb2_grpc

from service.admin import Stop
from service.api.grpc_services import new_server
from service.api.server_state import ServerState
from service.completion import wait_until
from service.config import Config
from service.errors import ShardMoved
from service.extension import Extension, GatewayParts, ServedShard
from service.extensions.gateways.forwarding import Forwarding
from service.extensions.gateways.peers import PeerInterceptor, Peers
from service.listening import binding
from service.shard import OpenJournal, OpenShard


class Member(Extension):
    """See `Extension` and `OtherGateways`. A subclass decides which shards are this gateway's."""

    port_for = "other gateways"
    stop_all: Stop | None = None
    # Set by `connect`.
    shards: Forwarding

    def __init__(self, config: Config, listen: str, peers: Peers) -> None:
        """`listen`: the address for the other gateways."""
        self._config = config
        self._peers = peers
        self.listen = listen
        self.secret = peers.secret
        self.open_home = self._open_home

    # Methods of subclasses.

    async def _open_home(self, open_journal: OpenJournal) -> OpenShard:
        """Opens the home shard, once this gateway has one. It keeps it until it ends. See `OpenHome`."""
        raise NotImplementedError

    def _add_port(self, server: grpc.aio.Server) -> int:
        """Binds `listen`. Returns the port."""
        raise NotImplementedError

    async def _keep_shards(self, stop: Stop) -> None:
        """Manages further shards, until cancelled. `stop`: see `GatewayParts`."""
        raise NotImplementedError

    async def _give_back(self, home: ServedShard) -> None:
        """Gives further shards back, once their calls have ended. `home`: the home shard."""

    # Common methods.

    def connect(self, home: ServedShard, state: ServerState) -> Member:
        """Creates the forwarding to the other gateways."""
        self.shards = Forwarding(self._config, home.shard, self._peers, state.budgets)
        return self

    def further_shards(self) -> Sequence[ServedShard]:
        return [*self.shards.cores.values()]

    def attach(self, parts: GatewayParts) -> None:
        """Registers the services for caches and texts on the port for gateways, as on the clients' port."""
        self._parts = parts
        self._server = new_server(self._config, PeerInterceptor(self.secret, parts.interceptor))
        # Their methods come from tables, which the type checker cannot see.
        executor = cast(executor_pb2_grpc.ModelExecutorServiceServicer, parts.api)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(executor, self._server)
        runner = cast(runner_pb2_grpc.ModelRunnerServiceServicer, parts.runner)
        runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(runner, self._server)

    def bind(self) -> int:
        """Binds the port for the other gateways. Raises CannotListen."""
        with binding(self.listen):
            return self._add_port(self._server)

    async def run(self) -> None:
        """Serves the other gateways, and runs further shards."""
        await self._server.start()
        try:
            await self._keep_shards(self._parts.stop)
        finally:
            await self.stop(0)

    def _open_core(self, opened: OpenShard) -> FurtherShard:
        return FurtherShard(self._parts.open_core(opened), self.shards)

    async def drain(self, grace_s: float) -> None:
        """Gives further shards back, and waits for calls that other gateways forwarded."""
        deadline_s = time.monotonic() + grace_s
        self.shards.is_draining = True
        await self._give_back(self._parts.shards()[0])
        await wait_until(lambda: not self.shards.in_flight, deadline_s - time.monotonic())

    async def stop(self, grace_s: float) -> None:
        """Ends calls that other gateways forwarded, and closes the connections to them."""
        await self._server.stop(grace_s)
        await self._peers.close()


class FurtherShard:
    """See `RunningCore`. Calls reach the shard from the creation of this object until `run` has ended."""

    def __init__(self, core: ServedShard, forwarding: Forwarding) -> None:
        self._core = core
        self._forwarding = forwarding
        forwarding.cores[core.shard.index] = core

    async def run(self) -> None:
        try:
            await self._core.run()
        finally:
            self._forwarding.cores.pop(self._core.shard.index, None)

    async def drain(self, grace_s: float) -> None:
        self._core.pool.detach_workers()
        # Before the core: each token of an execution is a new operation.
        await self._core.runner.executions.drain(grace_s)
        await self._core.drain(grace_s)

    def close(self) -> None:
        self._core.runner.executions.end_all()
        self._core.dispatcher.close(ShardMoved)
        self._core.close()
