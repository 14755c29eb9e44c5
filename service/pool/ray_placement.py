"""Places workers on a Ray cluster, for one gateway: `python -m service.pool.ray_placement`.

A process of its own, because Ray ends its drivers when it loses the head of the cluster. Without it workers
run on. The gateway starts it again and says what is still to be placed. Actors are detached, and are found
again by their names in a namespace of the gateway. Commands are lines of JSON on standard input:

    {"place": NAME}    answered by "placed" or "lost", later by "ended"
    {"watch": NAME}    answered by "ended", if the actor is found
    {"remove": NAME}

events are lines on standard output: see `Placement`. The process ends when standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from service.pool.ray_worker import RayWorker

_CONNECT_TIMEOUT_S = 60
# A cluster that does not answer for so long is lost: this process ends, and the next one connects again.
_ANSWER_TIMEOUT_S = 10
_POLL_S = 1.0
_REMOVE_TIMEOUT_S = 5.0
_ACTOR_THREADS = 4
_FILES = ("ca.pem", "worker.pem", "worker-key.pem")


class Placement:
    """Owner of the actors of the namespace."""

    def __init__(self, options: argparse.Namespace, events: int) -> None:
        """`events`: the file descriptor that they are written to."""
        self._events = events
        self._grace_s: float = options.grace_s
        self._certificates = {name: (options.pool / name).read_bytes() for name in _FILES}
        self._flags: list[str] = options.flags
        self._resources = _resources(options.resources, options.device)
        self._tasks: set[asyncio.Task[None]] = set()
        self._nodes: dict[str, str] = {}

    async def run(self) -> None:
        """Serves until standard input closes."""
        self._say("connected", actors=ray.util.list_named_actors())
        self._spawn(self._watch_nodes())
        commands = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        removing: set[asyncio.Task[None]] = set()
        while line := await commands.readline():
            ((verb, name),) = json.loads(line).items()
            if verb == "remove":
                removing.add(self._spawn(self._remove(name)))
            else:
                self._spawn(self._place(name, is_new=verb == "place"))
        if removing:
            await asyncio.wait(removing, timeout=_REMOVE_TIMEOUT_S)

    async def _place(self, name: str, *, is_new: bool) -> None:
        try:
            actor = _find(name)
            if actor is None and not is_new:
                return
            if actor is None:
                actor = self._create(name)
            if is_new:
                address, node, pid = await actor.start.remote(self._certificates, self._flags, self._grace_s)
                self._say("placed", name=name, address=address, node=node, pid=pid)
            status = await actor.wait.remote()
            self._say("ended", name=name, status=status)
        except (RayError, ValueError) as error:
            # A lost actor says nothing about its worker.
            self._say("lost", name=name, why=str(error).strip().splitlines()[-1])

    def _create(self, name: str) -> Any:
        resources = dict(self._resources)
        actor = ray.remote(RayWorker).options(
            name=name,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=_ACTOR_THREADS,
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy="SPREAD",
        )
        return actor.remote()

    async def _remove(self, name: str) -> None:
        actor = _find(name)
        if actor is None:
            return
        try:
            # Never answered by an actor that waits for resources.
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await actor.stop.remote()
        except (RayError, TimeoutError):
            pass
        ray.kill(actor)

    async def _watch_nodes(self) -> None:
        while True:
            # Ends this process if the call below does not return.
            signal.alarm(_ANSWER_TIMEOUT_S)
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            for node in nodes.keys() - self._nodes.keys():
                self._say("joined", node=node, host=nodes[node])
            for node in self._nodes.keys() - nodes.keys():
                self._say("left", node=node, host=self._nodes[node])
            self._nodes = nodes
            await asyncio.sleep(_POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Ray is not usable any more: the next process starts over.
            self._say("failed", why=f"{type(error).__name__}: {error}")
            os._exit(1)

    def _say(self, event: str, **fields: Any) -> None:
        say(self._events, event, **fields)


def say(events: int, event: str, **fields: Any) -> None:
    """Writes an event."""
    os.write(events, json.dumps({"event": event} | fields).encode() + b"\n")


def _find(name: str) -> Any:
    """The actor of a name. None if there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _resources(given: str, device: str) -> dict[str, float]:
    """What an actor takes."""
    if given:
        return {name: float(number) for name, number in (part.split("=") for part in given.split(","))}
    return {"GPU": 1} if device != "cpu" and ray.cluster_resources().get("GPU") else {"CPU": 1}


def _end_with_gateway() -> None:
    """Also while Ray does not answer."""
    standard_input = select.poll()
    standard_input.register(0, 0)
    standard_input.poll()
    time.sleep(_REMOVE_TIMEOUT_S + 1)
    os._exit(1)


def main() -> None:
    """Runs until standard input closes, or the cluster is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pool", required=True, type=Path)
    parser.add_argument("--resources", default="")
    parser.add_argument("--device", required=True)
    parser.add_argument("--grace-s", required=True, type=float)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    # Libraries print to standard output.
    events = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_gateway, daemon=True).start()
    signal.alarm(_CONNECT_TIMEOUT_S)
    status = 0
    try:
        ray.init(
            options.address, namespace=options.namespace, log_to_driver=False, logging_level=logging.WARNING
        )
        # Ray prints pages about each lost node.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        asyncio.run(Placement(options, events).run())
    except (RayError, OSError, RuntimeError) as error:
        say(events, "failed", why=f"{type(error).__name__}: {error}")
        status = 1
    # Ray's own end takes seconds.
    os._exit(status)


if __name__ == "__main__":
    main()
