"""Places workers on a Ray cluster, for one gateway: `python -m service.extensions.ray.placement OPTIONS`.

A process of its own, because Ray ends its drivers when it loses the head of the cluster. Workers run on
without it. The gateway starts it again, and says what there is and what is still to be placed. Actors are
detached, and are found again by their names in a namespace of the gateway. A line of standard input is
`place NAME`, answered by "placed" or "lost" and later by "leaving" and "ended"; `watch NAME`, of one that is
placed; or `remove NAME`. Events are lines of JSON on standard output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from service.extensions.ray.worker import RayWorker

_CONNECT_TIMEOUT_S = 30
# A cluster that does not answer for so long is lost: this process ends, and the next one connects again.
_ANSWER_TIMEOUT_S = 10
_POLL_S = 1.0
_REMOVE_TIMEOUT_S = 5.0
# Each driver that was lost lately may still use one.
_ACTOR_THREADS = 16
# A tenth of a GPU fits ten times. Ray counts in units of 0.0001.
_ROUNDING = 1e-6
_FILES = ("ca.pem", "worker.pem", "worker-key.pem")


class Placement:
    """Owner of the actors of the namespace."""

    def __init__(self, options: dict[str, Any], events: int) -> None:
        """`options`: see `RayLauncher`. `events`: the file descriptor that they are written to."""
        self._options = options
        self._events = events
        # Which workers dial.
        host, port = options["gateway"]["host"], options["gateway"]["port"]
        self._gateway = f"{host or ray.util.get_node_ip_address()}:{port}"
        self._files = {name: (Path(options["pool"]) / name).read_bytes() for name in _FILES}

    async def run(self) -> None:
        """Serves until standard input closes. Raises RayError."""
        self._say("connected", actors=ray.util.list_named_actors())
        commands = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(commands)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        removing = set()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_nodes())
            placing = set()
            while line := await commands.readline():
                verb, name = line.decode().split()
                if verb == "remove":
                    removing.add(tasks.create_task(self._remove(name)))
                else:
                    placing.add(tasks.create_task(self._place(name, is_new=verb == "place")))
            if removing:
                await asyncio.wait(removing)
            for task in (watching, *placing):
                task.cancel()

    async def _place(self, name: str, *, is_new: bool) -> None:
        try:
            actor = _find(name)
            if actor is None:
                if not is_new:
                    return
                actor = self._create(name)
            flags = ["--gateway", self._gateway, "--name", name, *self._options["flags"]]
            placed = await actor.start.remote(self._files, flags)
            self._say("placed", name=name, **placed)
            found: dict[str, Any] = {}
            is_leaving = False
            while "status" not in found:
                found = await actor.look.remote(is_leaving=is_leaving)
                if "within_s" in found:
                    is_leaving = True
                    self._say("leaving", name=name, **found)
            self._say("ended", name=name, **found)
        except (RayError, ValueError, AttributeError) as error:
            # Of a lost actor, which says nothing about its worker, or one of another version of Quire.
            self._say("lost", name=name, why=str(error).strip().splitlines()[-1])

    def _resources(self) -> dict[str, float]:
        """What a worker takes of a node."""
        if given := self._options["resources"]:
            return dict(given)
        has_gpu = self._options["device"] != "cpu" and ray.cluster_resources().get("GPU")
        return {"GPU": 1.0} if has_gpu else {"CPU": 1.0}

    def _create(self, name: str) -> Any:
        resources = self._resources()
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
        if (actor := _find(name)) is None:
            return
        try:
            # Never answered by an actor that waits for resources.
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await actor.stop.remote()
        except (RayError, TimeoutError):
            pass
        ray.kill(actor)

    async def _watch_nodes(self) -> None:
        known: dict[str, str] = {}
        known_room = -1
        while True:
            # Ends this process if a call below does not return.
            signal.alarm(_ANSWER_TIMEOUT_S)
            alive = [node for node in ray.nodes() if node["Alive"]]
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
            for node in nodes.keys() ^ known.keys():
                self._say("joined" if node in nodes else "left", node=node, host=(known | nodes)[node])
            needed = self._resources()
            room = sum(room_of(node["Resources"], needed) for node in alive)
            if room != known_room:
                self._say("room", workers=room)
            known, known_room = nodes, room
            await asyncio.sleep(_POLL_S)

    def _say(self, event: str, **fields: Any) -> None:
        os.write(self._events, json.dumps({"event": event} | fields).encode() + b"\n")


def room_of(resources: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """How many workers fit on a node with nothing else on it."""
    fitting = (resources.get(name, 0) / number + _ROUNDING for name, number in needed.items() if number)
    return int(min(fitting, default=1))


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def main() -> None:
    """Runs until standard input closes, or the cluster is lost."""
    options = json.loads(sys.argv[1])
    # Libraries print to standard output.
    events = os.dup(1)
    os.dup2(2, 1)
    signal.alarm(_CONNECT_TIMEOUT_S)
    ray.init(
        options["address"],
        namespace=options["namespace"],
        runtime_env=options["runtime_env"],
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    # Ray prints pages about each lost node.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    asyncio.run(Placement(options, events).run())
    # Ray's own end takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
