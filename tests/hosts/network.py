"""Hosts for tests: network namespaces of this machine, with links that can be cut, delayed and lossy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.checkout import ROOT, environment
from tests.forks import enter_network
from tests.hosts.switch import address_of

GATEWAY, CALLER, DATABASE = "gateway", "caller", "database"
_STOP_TIMEOUT_S = 30


def worker_hosts(count: int) -> list[str]:
    """The names of the workers' hosts."""
    return [f"worker{number}" for number in range(count)]


def gateway_hosts(count: int) -> list[str]:
    """The names of the gateways' hosts, where there are several."""
    return [f"{GATEWAY}{number}" for number in range(count)]


def missing() -> str:
    """What this machine lacks for it; "" if nothing."""
    if os.geteuid():
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the program ip"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    # Containers may have all of these without being allowed to use them.
    name = f"quire-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Network:
    """Use as a context manager. All hosts reach each other; a direction is from one host to another."""

    def __init__(self, hosts: Sequence[str], seed: int = 0) -> None:
        """`seed`: of which packets are lost."""
        self.hosts = list(hosts)
        # Interfaces have short names.
        self._prefix = f"q{os.getpid()}"
        self._seed = seed
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.switch", str(self._seed), self._prefix, *self.hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(ROOT),
            # A Ctrl+C is for this process.
            start_new_session=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the network could not be made")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._switch is not None
        with self._switch:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait(_STOP_TIMEOUT_S)

    def address(self, host: str) -> str:
        """Its IP address."""
        return address_of(self.hosts.index(host))

    def command(self, host: str) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def enter(self, host: str) -> None:
        """Moves this thread, and those that it starts, to a host."""
        enter_network(self.namespace(host))

    def set_direction(self, source: str, sink: str, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on, packets arrive so late, or are lost with this probability. Nobody is told."""
        self._tell({"source": source, "sink": sink, "delay": delay_s, "loss": loss})

    def set_up(self, host: str, *, up: bool) -> None:
        """Its interface is up, or down: programs there are told that the network cannot be reached."""
        self._tell({"host": host, "up": up})

    def namespace(self, host: str) -> str:
        """The name of its network namespace."""
        return f"{self._prefix}-{host}"

    def _tell(self, command: dict[str, object]) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(command) + "\n")
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != "done\n":
            raise RuntimeError("the network has ended")
