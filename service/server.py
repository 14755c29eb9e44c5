"""The server process: starts a gateway, runs it until a signal or a failure, and stops it.

The port is bound first, so a second server on the same port fails at once. Health is SERVING from the first
successful forward of a worker until draining starts. The first SIGTERM or SIGINT drains, the second one kills
the process. SIGUSR2 drains, too, but leaves the workers to the next gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

import uvloop

from service.auth.connections import TooFewDescriptors, with_descriptors
from service.auth.unix_socket import LockedUnixSocket
from service.config import Config
from service.extension import Extension
from service.gateway import Gateway, open_gateway
from service.journal.base import JournalUnusable, OwnershipLost
from service.listening import CannotListen, actual_address
from service.logging import configure_logging, get_logger
from service.pool.launcher import PoolFailed
from workers.common.addresses import ADDRESS_IS_FREE, UNIX, why_not_listening
from workers.common.switching import switch_often

_log = get_logger(__name__)


def run_gateway(
    config: Config, extensions: Sequence[Extension] = (), log_fields: Mapping[str, object] | None = None
) -> int:
    """Runs a gateway in this process, until a signal or a failure. Returns the exit status.

    Raises ConfigError. `extensions`: beside those that are found.
    """
    configure_logging(config.log_level, fields=log_fields)
    try:
        # Before the event loop, which uses file descriptors, too.
        config = with_descriptors(config)
    except TooFewDescriptors as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    switch_often()
    # What is loaded stays. Looking at it, a full pass of the garbage collector stopped the loop for 40 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, extensions))


async def serve(config: Config, extensions: Sequence[Extension] = ()) -> int:
    """Runs a gateway until a signal or a failure. Returns the exit status of the process."""
    with contextlib.ExitStack() as stack:
        path = config.listen.removeprefix(UNIX)
        is_unix = path != config.listen
        if is_unix:
            try:
                stack.callback(LockedUnixSocket(path).close)
            except OSError as error:
                _log.error("cannot listen", listen=config.listen, error=error.strerror)
                return 1
        try:
            gateway = await open_gateway(config, extensions)
        except JournalUnusable as error:
            # A server on the same port has locked the data directory, too. The port is the clearer message;
            # but one that gateways share their parent has.
            has_own_port = not (is_unix or any(one.has_parent for one in extensions))
            if has_own_port and (why_not := why_not_listening(config.listen)) != ADDRESS_IS_FREE:
                _log.error("cannot listen", listen=config.listen, error=why_not)
            else:
                _log.error("cannot use the journal", error=str(error))
            return 1
        stack.callback(gateway.close)
        return await _run(gateway)


async def _run(gateway: Gateway) -> int:
    config = gateway.config
    # First, so that no signal can leave anything behind.
    _stop_on_signals(gateway)
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
                await gateway.server.stop(0)
                return 1
            listen = actual_address(extension.listen, http_port)
            _log.info(f"listening for {extension.port_for}", listen=listen)
    # The model is logged when a worker is ready: workers may refuse the configured one.
    _log.info("listening", listen=actual_address(config.listen, port), workers=config.workers or "auto")
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


def _stop_on_signals(gateway: Gateway) -> None:
    """The first SIGTERM, SIGINT or SIGUSR2 starts a drain, the second one kills the process.

    SIGTERM and SIGINT stop the workers. SIGUSR2 leaves them to the next gateway.
    """
    ignores = any(one.has_parent for one in gateway.extensions)

    def on_signal(number: signal.Signals) -> None:
        if not ignores:
            gateway.stop_or_kill(leave_workers=number == signal.SIGUSR2)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # Also to ignore it: a handler is not inherited by the processes that this one starts.
        loop.add_signal_handler(number, on_signal, number)
