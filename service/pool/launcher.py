"""Interface that starts and stops the processes of a worker. A launcher decides where and how they run.

A worker may be a group of processes that start and stop together. One of them, `python -m workers`, dials a
port of the launcher (`worker_port.py`), is given its configuration there, and serves the stream. The
supervisor watches workers, replaces them and talks to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from service.pool.link import Endpoint
from workers.common import worker_pb2


class WorkerProcesses(Protocol):
    """The running processes of one incarnation of a worker."""

    # Higher than those of all earlier incarnations, including those of earlier gateways.
    epoch: int
    # The process that serves the stream; 0 if its pid has no meaning on this host.
    pid: int
    # Adopted, and started from other code than a new one would be.
    is_outdated: bool

    @property
    def endpoint(self) -> Endpoint:
        """How its stream is opened."""

    async def wait(self) -> int | None:
        """Waits until one process has exited. Returns its exit status, in the form of `subprocess`.

        None: the status is unknown, because an earlier gateway started the process.
        """

    async def stop(self, *, grace_s: float) -> int | None:
        """Stops all processes and returns the same as `wait`. The stream is closed already.

        The processes receive a request to stop. Those that still run after `grace_s` are killed.
        """

    def kill(self) -> None:
        """Kills all processes without waiting for them to exit."""

    def detach(self) -> None:
        """Stops watching the processes. Those that can outlive this gateway can be adopted by another one."""


class Launcher(Protocol):
    """Starts workers on some kind of machine."""

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, WorkerProcesses]:
        """Adopts workers of earlier gateways. Returns at most one for each config, by worker_id.

        Called once, before the first `start`. A worker that has no config here, or that was started with a
        different one, is stopped. Raises PoolFailed.
        """

    async def start(self, config: worker_pb2.WorkerConfig) -> WorkerProcesses:
        """Starts a new incarnation of a worker. It need not answer yet.

        Raises OSError where a retry may help, PoolFailed where it cannot.
        """

    def close(self) -> None:
        """Releases resources, after all workers are stopped or detached."""


class PoolFailed(Exception):
    """The pool cannot start and a retry cannot help. The message is for the operator.

    `status`: the exit status of the server.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
