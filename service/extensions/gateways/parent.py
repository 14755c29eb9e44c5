"""`quire serve --gateways N`: the parent process, which starts the gateways of this host and restarts them.

The parent passes on stop signals, and restarts a gateway that a signal has killed: with the same shard, so
that it recovers its caches and adopts its workers. A gateway that exits by itself ends the server, with its
status. The parent answers no calls. A gateway is a process of `process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from service.config import Config, all_settings
from service.data_directory import data_directory
from service.extensions.gateways.one_host import LEAVE_WORKERS, STOP, Place, places
from service.journal.base import JournalUnusable
from service.listening import CannotListen, actual_address, binding
from service.logging import get_logger
from service.model_names import SHIPPED_MODELS, WEIGHTLESS_MODEL
from service.pool import gpus
from service.settings import ConfigError
from workers.common import child_process
from workers.common.addresses import ADDRESS_IS_FREE, why_not_listening

_log = get_logger(__name__)
# A gateway that ran for a shorter time is restarted with a delay.
_LONG_LIFE_S = 10.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 10.0


def run(config: Config) -> int:
    """Serves until a signal. Returns the exit status. Raises ConfigError."""
    config = gpus.with_workers(config, gpus.chosen(config))
    if config.gateways > config.worker_slots:
        raise ConfigError("workers", "", "auto", f"each of {config.gateways} gateways needs a worker")
    with contextlib.ExitStack() as stack:
        shared = {
            one.name: address
            for one, _, address in config.ports()
            if one.port is not None and not one.port.of_each_gateway
        }
        for address in shared.values():
            if (why_not := why_not_listening(address)) != ADDRESS_IS_FREE:
                _log.error("cannot listen", listen=address, error=why_not)
                return 1
        try:
            found = stack.enter_context(places(data_directory(config), config.gateways))
        except (JournalUnusable, OSError) as error:
            _log.error("cannot use the data directory", error=str(error))
            return 1
        # Held, so that no other program takes a port that is chosen now.
        try:
            held = {name: stack.enter_context(reserved(address)) for name, address in shared.items()}
        except CannotListen as error:
            _log.error("cannot listen", listen=error.listen, error=error.why)
            return 1
        config = config.with_values(held)
        _log.info(
            "starting gateways", listen=config.listen, gateways=config.gateways, workers=config.worker_slots
        )
        return asyncio.run(_Parent([_first_line(config, place) for place in found]).run())


def _first_line(config: Config, place: Place) -> bytes:
    """The line that a gateway reads at its start: its settings and its place."""
    content = {
        "config": _with_absolute_paths(config.of_gateway(place.shard.index)).values(),
        "place": dataclasses.asdict(place),
    }
    # `default`: for the path of the directory.
    return json.dumps(content, default=str).encode() + b"\n"


def _with_absolute_paths(config: Config) -> Config:
    """The settings with absolute paths, since gateways start in another directory."""
    names = [name for name, setting in all_settings().items() if setting.is_path]
    if not (config.has_remote_workers or config.model in (*SHIPPED_MODELS, WEIGHTLESS_MODEL)):
        names.append("model")
    values = config.values()
    return config.with_values({name: str(Path(values[name]).absolute()) for name in names if values[name]})


class _Parent:
    """Owner of the gateways' processes. Starts and restarts them."""

    def __init__(self, first_lines: Sequence[bytes]) -> None:
        self._first_lines = first_lines
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._command = b""
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Runs the gateways until all have ended. Returns the exit status of the server."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            command = LEAVE_WORKERS if number == signal.SIGUSR2 else STOP
            loop.add_signal_handler(number, self._tell_all, command)
        keeping = [asyncio.create_task(self._keep(index)) for index in range(len(self._first_lines))]
        await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            self._tell_all(STOP)
        return max(await asyncio.gather(*keeping))

    def _tell_all(self, command: bytes) -> None:
        self._command = command
        self._stopping.set()
        for process in self._processes.values():
            self._tell(process, command)

    @staticmethod
    def _tell(process: asyncio.subprocess.Process, line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(line)

    async def _keep(self, index: int) -> int:
        """Runs one gateway until it ends by itself, or the server stops. Returns its exit status."""
        backoff_s = 0.0
        while True:
            started_s = time.monotonic()
            status = await self._run_once(index)
            if status >= 0:
                return status
            if self._stopping.is_set():
                return 1
            backoff_s = min(max(_MIN_BACKOFF_S, 2 * backoff_s), _MAX_BACKOFF_S)
            if time.monotonic() - started_s > _LONG_LIFE_S:
                backoff_s = 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                return 0

    async def _run_once(self, index: int) -> int:
        """Runs a process of one gateway. Returns its exit status; below 0 if it has to be restarted."""
        try:
            process = await self._start(index)
        except OSError as error:
            # For example, the system has no process or memory left now.
            _log.error("a gateway cannot be started", gateway=index, error=error.strerror)
            return -1
        self._processes[index] = process
        if self._stopping.is_set():
            self._tell(process, self._command)
        status = await process.wait()
        del self._processes[index]
        if status < 0 and not self._stopping.is_set():
            _log.warning("a gateway was killed and is restarted", gateway=index, signal=-status)
        return status

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        environment = os.environ | {"PYTHONPATH": child_process.import_path()}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "service.extensions.gateways.process"),
            stdin=asyncio.subprocess.PIPE,
            cwd=child_process.DIRECTORY,
            env=environment,
            # Ctrl-C in a terminal signals only the parent.
            start_new_session=True,
        )
        self._tell(process, self._first_lines[index])
        return process


@contextlib.contextmanager
def reserved(address: str) -> Iterator[str]:
    """Reserves an address for several gateways; port 0 becomes the chosen port. Raises CannotListen."""
    host, _, port = address.rpartition(":")
    with binding(address):
        family, *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Without listen(), this socket gets no connections.
        with binding(address):
            held.bind(found)
        yield actual_address(address, held.getsockname()[1])
