"""The server process: starts a gateway, runs it until a signal or a failure, and stops it.

The port is bound first, so a second server on the same port fails at once. Health is SERVING from the first
successful forward of a worker until draining starts. The first SIGTERM or SIGINT drains, the second one kills
the process. SIGUSR2 drains, too, but leaves the workers to the next gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from service.adapters.loader import FindAdapter
from service.auth.unix_socket import LockedUnixSocket
from service.config import Config
from service.core import OpenShard, open_leased
from service.gateway import Gateway
from service.journal.base import JournalUnusable
from service.listening import CannotListen, actual_address
from service.logging import drain_log, get_logger
from service.pool.launcher import PoolFailed
from service.postgres.errors import DatabaseFailed
from service.runtimes.sources import FindModel
from service.settings import needing_extra
from service.shards.keeper import Keeper
from service.shards.leases import OwnershipLost
from service.shards.one_host import LEAVE_WORKERS, Membership
from workers.common.addresses import ADDRESS_IS_FREE, why_not_listening

_log = get_logger(__name__)


async def serve(
    config: Config,
    find_model: FindModel | None = None,
    find_adapter: FindAdapter | None = None,
    member: Membership | None = None,
) -> int:
    """Runs a gateway until a signal or a failure. Returns the exit status of the process.

    The caller raises the limit on file descriptors: see `with_descriptors`. Other arguments: see `Gateway`.
    """
    with contextlib.ExitStack() as stack:
        is_unix = config.listen.startswith("unix:")
        if is_unix:
            try:
                stack.callback(LockedUnixSocket(config.listen.removeprefix("unix:")).close)
            except OSError as error:
                _log.error("cannot listen", listen=config.listen, error=error.strerror)
                return 1
        try:
            cluster = await _join(config) if config.peer_listen else None
            gateway = Gateway(config, find_model, find_adapter, member, cluster)
        except JournalUnusable as error:
            # A server on the same port has locked the data directory, too. The port is the clearer message.
            if not is_unix and (why_not := why_not_listening(config.listen)) != ADDRESS_IS_FREE:
                _log.error("cannot listen", listen=config.listen, error=why_not)
            else:
                _log.error("cannot use the journal", error=str(error))
            return 1
        stack.callback(gateway.close)
        return await _run(gateway, is_member=member is not None)


async def _join(config: Config) -> tuple[Keeper, OpenShard]:
    """Waits for a first shard, and opens it. Raises JournalUnusable or ConfigError."""
    with needing_extra("postgres", "journal", config.journal):
        keeper = Keeper(config, f"{config.peer_listen} {config.advertise}".strip())
    try:
        return keeper, await open_leased(config, *await keeper.join())
    except (DatabaseFailed, OwnershipLost) as error:
        raise JournalUnusable(f"the database of the journal: {error}") from None


async def _run(gateway: Gateway, *, is_member: bool) -> int:
    config = gateway.config
    # First, so that no signal can leave anything behind.
    _stop_on_signals(gateway, is_member=is_member)
    try:
        port = await gateway.start()
    except CannotListen as error:
        _log.error("cannot listen", listen=error.listen, error=error.why)
        return 1
    for extension in gateway.extensions:
        if extension.listen:
            try:
                http_port = extension.bind()
            except CannotListen as error:
                _log.error("cannot listen", listen=error.listen, error=error.why)
                await gateway.stop_servers(0)
                return 1
            listen = actual_address(extension.listen, http_port)
            _log.info(f"listening for {extension.port_for}", listen=listen)
    worker_count = len(config.worker_addresses) or config.workers
    # The model is logged when a worker is ready: workers may refuse the configured one.
    _log.info("listening", listen=actual_address(config.listen, port), workers=worker_count or "auto")
    workers = asyncio.create_task(gateway.run_workers(), name="workers")
    stopping = asyncio.create_task(gateway.stopping.wait())
    await asyncio.wait({workers, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if workers.done():
        status = _report_failure(workers)
        await gateway.fail()
    else:
        _log.info("draining", operations=gateway.core.caches.operations_in_flight)
        await gateway.drain()
    stopping.cancel()
    workers.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await workers
    await gateway.finish()
    _log.info("stopped")
    return status


def _report_failure(workers: asyncio.Task[None]) -> int:
    error, status = workers.exception(), 1
    for failure in _single(error) if error is not None else ():
        if isinstance(failure, PoolFailed):
            status = max(status, failure.status)
            _log.error("cannot start workers", error=str(failure))
        elif isinstance(failure, OwnershipLost):
            _log.error("the journal is not this gateway's any more", error=str(failure))
        else:
            _log.error("the worker pool failed", exc_info=failure)
    return status


def _single(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group and in nested groups, or the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _single(inner)
    else:
        yield error


def _stop_on_signals(gateway: Gateway, *, is_member: bool) -> None:
    """The first SIGTERM, SIGINT or SIGUSR2 starts a drain, the second one kills the process.

    SIGTERM and SIGINT stop the workers. SIGUSR2 leaves them to the next gateway. One of several gateways is
    told by its parent: service managers send signals to all processes at once.
    """

    def on_parent() -> None:
        told = os.read(sys.stdin.fileno(), 1)
        if not told:
            # The parent was killed.
            signal.raise_signal(signal.SIGKILL)
        on_signal(signal.SIGUSR2 if told == LEAVE_WORKERS else signal.SIGTERM)

    def on_signal(number: signal.Signals) -> None:
        leave_workers = number == signal.SIGUSR2
        if gateway.stopping.is_set():
            _log.warning("stopping at once")
            if not leave_workers:
                gateway.core.pool.kill()
            drain_log()
            signal.raise_signal(signal.SIGKILL)
        gateway.stop(leave_workers=leave_workers)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # Ignored by a handler, which the processes that it starts do not inherit.
        loop.add_signal_handler(number, (lambda _: None) if is_member else on_signal, number)
    if is_member:
        loop.add_reader(sys.stdin.fileno(), on_parent)
