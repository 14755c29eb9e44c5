"""The gateway's life: start, serve, drain, stop.

The port is bound first, so a second server on it fails at once. Health says SERVING from the moment a worker
has come through a real forward until draining begins. A first SIGTERM or SIGINT drains, a second one stops at
once; SIGUSR2 is a SIGTERM that leaves the workers for the next gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from quire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    executor_pb2,
    executor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    worker_pb2,
)

from service.api import admin
from service.api.executor import ExecutorApi
from service.api.health import HealthApi
from service.api.interceptor import CallInterceptor
from service.api.parsing import MessageLimits
from service.api.reflection import add_reflection
from service.api.server_state import ServerState
from service.caches.effects import Claim, Event
from service.caches.placement import WorkerView
from service.caches.table import CacheTable, Limits
from service.caches.tenants import Tenant
from service.config import SHIPPED_MODEL, WEIGHTLESS_MODEL, Config, ConfigError
from service.data_directory import data_directory
from service.dispatcher import Dispatcher
from service.doors.doors import Doors, current_tenant, current_tenant_name
from service.doors.guest_watch import GuestWatch
from service.doors.tls import server_credentials
from service.doors.transport import server_options
from service.doors.unix_socket import IN_USE, OwnSocket
from service.errors import BadRuntimes
from service.journal.base import JournalUnusable
from service.journal.memory import MemoryJournal
from service.journal.sqlite import SqliteJournal, open_journal
from service.logging import drain_log, get_logger
from service.memory import MemoryReturner
from service.pool.base import PoolFailed, WorkerSlot
from service.pool.crew import Crew
from service.pool.local import LocalLauncher
from service.pool.rotation import Rotation
from service.pool.served import Served, ServedFile, choose, from_mark, to_mark
from service.pool.supervisor import Supervisor
from service.runtimes.executions import Executions
from service.runtimes.loading import WeightsLoader
from service.runtimes.local import LocalRuntime
from service.runtimes.remote.spending import Spending
from service.runtimes.runtimes_file import RuntimesFile
from service.runtimes.servicer import RunnerApi
from service.runtimes.sources import FindModel, Sources
from service.text.text_model import TextModel

if TYPE_CHECKING:
    from service.openai.front import OpenAiFront

_log = get_logger(__name__)

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
EXECUTOR_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name
RUNNER_SERVICE = runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name
_HEALTH_NAMES = ("", EXECUTOR_SERVICE, RUNNER_SERVICE)
_SHIPPED_MODEL_DIR = Path(__file__).parent.parent / "workers" / "models" / SHIPPED_MODEL
# What open streams (health watches) get after all of our own calls have ended.
_FINAL_GRACE_S = 0.2
_POLL_INTERVAL_S = 0.02
_ADDRESS_IS_FREE = "the address is free by now"


class Gateway:
    """Owner of all parts of one gateway; tells them of one another (a WorkerListener)."""

    def __init__(self, config: Config, find_model: FindModel | None = None) -> None:
        """`find_model`: finds models of the hub for LoadWeights. Raises JournalUnusable."""
        self._find_model = find_model
        self.config = config
        limits = Limits(
            max_queued_operations=config.max_queued_operations,
            max_wait_s=config.max_wait_s,
            default_lease_s=config.default_lease_s,
            max_lease_s=config.max_lease_s,
            max_caches=config.max_caches,
            max_journal_bytes=config.max_journal_bytes,
        )
        directory = data_directory(config)
        self.doors = Doors.of(config)
        self.caches = CacheTable(limits)
        self.journal = self._open_journal(directory)
        self.served_file = ServedFile(directory)
        self._served_as_written = self.served_file.read()
        of_caches, in_journal = from_mark(self.journal.model_fingerprint)
        self.served = choose(self._served_as_written, _model_argument(config.model), in_journal)
        self._log_served()
        self.caches.weights = self.served.weights
        self.pool = Supervisor(
            config,
            self.served.model,
            LocalLauncher(directory, config.orphan_grace_s if directory is not None else 0.0),
            self,
            expected_model=of_caches if self.caches.has_weights(self.served.weights) else None,
            weights=self.served.weights,
        )
        self.dispatcher = Dispatcher(self.caches, self.journal, self.pool.send)
        self.rotation = Rotation(self.pool, self.dispatcher)
        # Set when the server is to end.
        self.stopping = asyncio.Event()
        self.state = ServerState(config)
        self.state.weights = self.served.weights
        self.state.weights_of = lambda cache_id: self.dispatcher.weights_of(cache_id, current_tenant())
        self.state.has_recovered = len(self.caches) > 0
        self.state.slots = self.pool.slots
        self.api = ExecutorApi(self.dispatcher, self.state, self.pool)
        self.text = TextModel(lambda: self.state.first_ready, current_tenant_name)
        # A journal that forgets does so with all that callers have done.
        keeps = isinstance(self.journal, SqliteJournal)
        self.spending = Spending(directory if keeps else None)
        self.runtimes_file = self._read_runtimes()
        self.router = self.runtimes_file.router
        self.executions = Executions(self.router, self.state)
        self.runner = RunnerApi(self.executions, self.router, self.state, self.runtimes_file.read_again)
        self.front = self._open_front() if config.openai_listen else None
        messages = MessageLimits(
            config.max_calls_per_message,
            config.max_items_per_call,
            max_seq_tokens=lambda: self.state.max_seq_tokens,
            vocab_size=lambda: self.state.vocab_size,
        )
        self.health = HealthApi()
        self.credentials = server_credentials(config)
        self.server = grpc.aio.server(
            interceptors=[CallInterceptor(messages, self.doors, self.state.reception, self.state.refusals)],
            options=server_options(config),
        )
        # The stubs register each method twice. For those registered by name grpcio's asyncio server waits on
        # a task each, anew with every call: of 35 methods, a quarter of the Python calls of a Decode.
        self.server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
        self._guests: GuestWatch | None = None
        # What the log says once, when the first worker is ready.
        self._when_ready: dict[str, str] = {}
        self._background: list[asyncio.Task[None]] = []

    def _read_runtimes(self) -> RuntimesFile:
        """The runtimes, and who takes a batch. Raises BadRuntimes."""
        loader = WeightsLoader(
            self.pool,
            self.dispatcher,
            self.state,
            self.rotation,
            Sources(_SHIPPED_MODEL_DIR, self._find_model),
            self.served_file,
            self.served.configured,
            self._on_switch,
        )
        local = LocalRuntime(self.dispatcher, self.state, self.text, self.rotation, loader)
        path = Path(self.config.runtimes) if self.config.runtimes else None
        return RuntimesFile(path, local, self.spending)

    def _log_served(self) -> None:
        written, served = self._served_as_written, self.served
        if served.model != served.configured:
            _log.info(
                "serving the weights that were loaded last", model=served.model, configured=served.configured
            )
        elif written is not None and written.model != served.model:
            _log.warning("serving what the settings name, not what was loaded last", loaded=written.model)

    def _open_front(self) -> OpenAiFront:
        """The HTTP front. Raises ConfigError without the libraries that it needs."""
        try:
            from service.openai.front import OpenAiFront  # noqa: PLC0415 - its libraries are an extra
        except ModuleNotFoundError as error:
            allowed = f"needs {error.name}, of the extra openai: `make setup` installs it"
            raise ConfigError("openai_listen", "a setting", self.config.openai_listen, allowed) from None
        return OpenAiFront(self.executions, self.router, self.state, self.text, self.doors)

    def _open_journal(self, directory: Path | None) -> SqliteJournal | MemoryJournal:
        """The journal, with what it has kept in the table. Raises JournalUnusable."""
        if self.config.journal == "memory" or (self.config.journal != "sqlite" and directory is None):
            return MemoryJournal()
        if directory is None:
            raise JournalUnusable("journal = sqlite needs a data_dir if the port is chosen anew each time")
        journal = open_journal(directory, "full" if self.config.journal_sync == "full" else "normal")
        began_s = time.monotonic()
        journal.recover(self.caches.recovering, self.caches.recovering_run)
        anyone: dict[str, Tenant] = {}
        tenant_of = self.doors.tenant if self.doors is not None else lambda n: anyone.setdefault(n, Tenant(n))
        self.caches.recovered(now_s=time.monotonic(), wall_s=time.time(), tenant_of=tenant_of)
        if len(self.caches):
            took_ms = round(1e3 * (time.monotonic() - began_s))
            _log.info("recovered", caches=len(self.caches), journal=str(directory), took_ms=took_ms)
        return journal

    def stop(self, *, leave_workers: bool = False) -> None:
        """Begins to end; `leave_workers`: to the next gateway on the same data directory."""
        if leave_workers:
            self.pool.leave()
        self.stopping.set()

    async def start(self) -> int:
        """Binds the port and starts serving. Returns the port; 0 for a Unix socket. Raises RuntimeError."""
        for name in _HEALTH_NAMES:
            await self._set_health(name, serving=False)
        # Its data calls come from a table, which the stubs cannot see.
        servicer = cast(executor_pb2_grpc.ModelExecutorServiceServicer, self.api)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, self.server)
        runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(
            cast(runner_pb2_grpc.ModelRunnerServiceServicer, self.runner), self.server
        )
        names = [EXECUTOR_SERVICE, RUNNER_SERVICE, health.SERVICE_NAME]
        if admin.is_offered(self.config):
            operators = cast(
                admin_pb2_grpc.AdminServiceServicer,
                admin.AdminApi(self.state, self.rotation, self.config, self.stop),
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
        listen = _listen(self.config.listen, port)
        self._when_ready = {"listen": listen} | _first_command(self.config, listen)
        self._guests = GuestWatch(self.state.guests, self.config.listen, port)
        await self.server.start()
        return port

    def close(self) -> None:
        """Ends the processes of texts and lets go of the journal, after all has stopped."""
        self.text.close()
        # What the last answers rest on; it has been written already, as a rule.
        self.journal.close()

    async def run_workers(self) -> None:
        """Keeps the workers running and leases honoured, until cancelled. Raises PoolFailed."""
        try:
            await self._run_all()
        finally:
            if self._guests is not None:
                self._guests.close()

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pool.run(), name="pool")
            group.create_task(self.dispatcher.keep_time(), name="time")
            if self.doors is not None:
                group.create_task(self.doors.watch(), name="doors")
            group.create_task(self.state.watch.run(), name="watch")
            group.create_task(self.state.reception.run(), name="reception")
            if self._guests is not None:
                group.create_task(self._guests.run(), name="guests")
            if self.front is not None:
                group.create_task(self.front.run(), name="front")
            group.create_task(MemoryReturner(self.state.memory).run(), name="memory")

    async def drain(self) -> None:
        """Stops taking calls and waits for those in flight, for as long as the grace allows."""
        self.state.draining = True
        for name in _HEALTH_NAMES:
            await self._set_health(name, serving=False)
        # Load balancers see NOT_SERVING and look elsewhere while calls are still taken.
        await asyncio.sleep(self.config.lame_duck_s)
        deadline_s = time.monotonic() + self.config.drain_grace_s
        # Each step of an execution is an operation anew: they end first.
        self.executions.drain()
        while self.executions.num_unfinished and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
        self.executions.end_all()
        self.dispatcher.start_draining()
        self.api.end_sessions()
        # Polled: an event for it would cost each call something, for the sake of one moment.
        while self.dispatcher.operations_in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
        if self.front is not None:
            await self.front.stop(_FINAL_GRACE_S)
        await self.server.stop(_FINAL_GRACE_S)

    # WorkerListener.

    def claims(self, holdings: Mapping[int, int]) -> Sequence[Claim]:
        """What of the sequences that a worker has kept is as the journal has it."""
        return self.dispatcher.claims(holdings)

    def worker_ready(self, slot: WorkerSlot, kept: Mapping[int, int]) -> None:
        """Tells the parts of a worker that can serve."""
        assert slot.ready is not None
        self.state.worker_became_ready(slot.ready, slot.weights)
        if slot.weights == self.dispatcher.weights:
            self._bind(slot.ready.model.fingerprint, slot.weights)
            self._write_served()
        view = _view_of(slot.worker_id, slot.epoch, slot.ready, slot.weights)
        self.dispatcher.worker_ready(view, kept)
        self._publish_health()
        if self._when_ready:
            _log.info("ready", **self._when_ready)
            self._when_ready = {}

    def _on_switch(self, crew: Crew) -> None:
        """These weights are served from now on."""
        self._served_as_written = self.served = Served(self.served.configured, crew.model, crew.weights)
        self._bind(crew.fingerprint or "", crew.weights)
        self.state.slots = crew.slots
        self._publish_health()

    def _write_served(self) -> None:
        """The settings name something else than when weights were loaded, and it can be served."""
        if self._served_as_written in (None, self.served):
            return
        try:
            # Once, before anybody calls.
            self.served_file.write(self.served)
            self._served_as_written = self.served
        except OSError as error:
            _log.warning("it cannot be written down which weights are served", error=error.strerror)

    def _bind(self, fingerprint: str, weights: int) -> None:
        self.journal.bind_model(to_mark(fingerprint, weights))

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool) -> None:
        """Tells the parts of a worker that is gone."""
        self.dispatcher.worker_lost(worker_id, epoch, crashed=crashed)
        self._publish_health()

    def worker_suspected(self, slot: WorkerSlot) -> None:
        """Keeps new sequences away from a worker that is silent."""
        self.dispatcher.worker_suspected(slot.worker_id, slot.epoch, suspect=slot.suspect)

    def worker_answered(self, slot: WorkerSlot, events: Iterable[Event], pages_available: int) -> None:
        """Passes on a worker's answers."""
        self.dispatcher.worker_answered(slot.worker_id, slot.epoch, events, pages_available)

    def _publish_health(self) -> None:
        serving = self.state.state == executor_pb2.SERVER_STATE_SERVING
        for name in _HEALTH_NAMES:
            task = asyncio.create_task(self._set_health(name, serving=serving))
            self._background.append(task)
            task.add_done_callback(self._background.remove)

    async def _set_health(self, name: str, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set(name, status.SERVING if serving else status.NOT_SERVING)


def _view_of(worker_id: str, epoch: int, ready: worker_pb2.WorkerReady, weights: int = 0) -> WorkerView:
    """What the caches need to know of a worker."""
    return WorkerView(
        worker_id,
        epoch,
        page_tokens=ready.executor.page_size_tokens,
        pages_total=ready.pages_total,
        capacity_tokens=ready.executor.kv_capacity_tokens,
        pages_available=ready.pages_total,
        weights=weights,
    )


def _model_argument(model: str) -> str:
    """What a worker is told to load: an absolute directory, or the weightless executor's name."""
    if model == WEIGHTLESS_MODEL:
        return model
    return str(_SHIPPED_MODEL_DIR if model == SHIPPED_MODEL else Path(model).resolve())


def _first_command(config: Config, listen: str) -> dict[str, str]:
    """A command to try next, as one types it; none where callers need certificates or tokens."""
    if config.tls_cert or config.tokens:
        return {}
    program = sys.argv[0] if Path(sys.argv[0]).name == "quire" else "quire"
    command = [program, "status"]
    if config.model != WEIGHTLESS_MODEL:
        # The shipped model adds numbers.
        command = [program, "generate", "12+34=" if config.model == SHIPPED_MODEL else "Hello"]
    if listen != Config().listen:
        command += ["--target", listen]
    return {"try_next": shlex.join(command)}


async def serve(config: Config, find_model: FindModel | None = None) -> int:
    """Runs a gateway until a signal ends it. Returns the process's exit status.

    The descriptors for it are the caller's matter: see `with_descriptors`. `find_model`: see `Gateway`.
    """
    with contextlib.ExitStack() as stack:
        is_unix = config.listen.startswith("unix:")
        if is_unix:
            try:
                stack.callback(OwnSocket(config.listen.removeprefix("unix:")).close)
            except OSError as error:
                _log.error("cannot listen", listen=config.listen, error=error.strerror)
                return 1
        try:
            gateway = Gateway(config, find_model)
        except JournalUnusable as error:
            # A server on the same port has the data directory, too; who starts a second one knows the port.
            if not is_unix and (why_not := why_not_listening(config.listen)) != _ADDRESS_IS_FREE:
                _log.error("cannot listen", listen=config.listen, error=why_not)
            else:
                _log.error("cannot use the journal", error=str(error))
            return 1
        except BadRuntimes as error:
            _log.error("cannot use the runtimes", path=config.runtimes, error=error.message)
            return 2
        stack.callback(gateway.close)
        return await _run(gateway)


async def _run(gateway: Gateway) -> int:
    """Serves until a signal or a failure ends it. Returns the process's exit status."""
    config = gateway.config
    # Before anything is there that a signal would leave.
    _stop_on_signals(gateway)
    try:
        port = await gateway.start()
    except RuntimeError:
        _log.error("cannot listen", listen=config.listen, error=why_not_listening(config.listen))
        return 1
    if gateway.front is not None:
        try:
            http_port = gateway.front.bind()
        except OSError as error:
            _log.error("cannot listen", listen=config.openai_listen, error=error.strerror)
            await gateway.server.stop(0)
            return 1
        _log.info("listening for HTTP", listen=_listen(config.openai_listen, http_port))
    # Which model is said by a worker that is ready: this one may be refused.
    _log.info("listening", listen=_listen(config.listen, port), workers=config.workers)
    workers = asyncio.create_task(gateway.run_workers(), name="workers")
    stopping = asyncio.create_task(gateway.stopping.wait())
    await asyncio.wait({workers, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if workers.done():
        status = _report_failure(workers)
        await gateway.server.stop(0)
    else:
        _log.info("draining", operations=gateway.dispatcher.operations_in_flight)
        await gateway.drain()
    stopping.cancel()
    workers.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await workers
    await gateway.router.close()
    await gateway.spending.saved()
    _log.info("stopped")
    return status


def _listen(address: str, port: int) -> str:
    """An address with the port that it took; that of a Unix socket as it is."""
    return f"{address.rpartition(':')[0]}:{port}" if port > 1 else address


def why_not_listening(listen: str) -> str:
    """What the system says of an address that cannot be bound: gRPC does not tell. Binds for a moment."""
    path = listen.removeprefix("unix:")
    try:
        if path != listen:
            _try_to_bind(socket.AF_UNIX, path)
            Path(path).unlink()
        else:
            host, _, port = listen.rpartition(":")
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, *_, address in found:
                _try_to_bind(family, address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return str(error.strerror)
        if path == listen:
            return IN_USE
        return "it is a directory: name a file in it" if Path(path).is_dir() else "something is at this path"
    return _ADDRESS_IS_FREE


def _try_to_bind(family: int, address: Any) -> None:
    """Raises OSError."""
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As gRPC does: connections that are being closed do not count.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


def _report_failure(workers: asyncio.Task[None]) -> int:
    error = workers.exception()
    for failure in _single(error) if error is not None else ():
        if isinstance(failure, PoolFailed):
            _log.error("cannot start workers", error=str(failure))
        else:
            _log.error("the worker pool failed", exc_info=failure)
    return 1


def _single(error: BaseException) -> Iterator[BaseException]:
    """An error that is no group, or those of a group and of the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _single(inner)
    else:
        yield error


def _stop_on_signals(gateway: Gateway) -> None:
    """The first SIGTERM, SIGINT or SIGUSR2 begins to end; the second ends the process.

    With it the workers end, but with SIGUSR2: then the next gateway can have them.
    """

    def on_signal(number: signal.Signals) -> None:
        leaves = number == signal.SIGUSR2
        if gateway.stopping.is_set():
            _log.warning("stopping at once")
            if not leaves:
                gateway.pool.kill()
            drain_log()
            signal.raise_signal(signal.SIGKILL)
        gateway.stop(leave_workers=leaves)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, on_signal, number)
