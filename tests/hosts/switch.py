"""A network of hosts on one machine: namespaces, and this process, which carries their packets.

`python -m tests.hosts.switch SEED PREFIX HOST...` makes a network namespace `PREFIX-HOST` for each host, with
a TUN device. It carries out commands of its standard input, one JSON object a line, and confirms each by a
line. When its input ends, whatever has ended the process at the other end, it kills what still runs in the
namespaces and removes them. The kernel needs neither netem nor a packet filter.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SUBNET = "10.213.7"
_MAX_PACKET_BYTES = 65536
# Read from one host before the others have their turn.
_BURST = 64


def address_of(index: int) -> str:
    """Of the host with this place among the names."""
    return f"{_SUBNET}.{index + 1}"


@dataclass
class Direction:
    """What happens to packets from one host to another. Times in seconds, `loss` a probability."""

    delay: float = 0.0
    loss: float = 0.0


class Switch:
    """Owner of the namespaces and of the packets under way."""

    def __init__(self, seed: int, prefix: str, hosts: list[str]) -> None:
        self._rng = random.Random(seed)
        # It may have moved itself to a host.
        self._owner = os.getppid()
        self._namespaces = {host: f"{prefix}-{host}" for host in hosts}
        # By address.
        self._devices: dict[bytes, int] = {}
        self._directions: dict[tuple[bytes, bytes], Direction] = {}
        self._addresses = {host: address_of(index) for index, host in enumerate(hosts)}
        # When they are due, in which order they were sent, and where to.
        self._late: list[tuple[float, int, bytes, bytes]] = []
        self._sent = 0

    def make(self) -> None:
        """Raises OSError or subprocess.CalledProcessError where something is missing."""
        for host, namespace in self._namespaces.items():
            _ip("netns", "add", namespace)
            address = self._addresses[host]
            # Until it is in the namespace, its name has to be unique, and short.
            name = f"q{os.getpid()}n{len(self._devices)}"
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", name, "netns", namespace)
            for command in (
                ("link", "set", "lo", "up"),
                ("link", "set", name, "name", "net0"),
                ("addr", "add", f"{address}/24", "dev", "net0"),
                ("link", "set", "net0", "up"),
            ):
                _ip("-n", namespace, *command)
            self._devices[socket.inet_aton(address)] = device
        for source in self._devices:
            for sink in self._devices:
                self._directions[source, sink] = Direction()

    def run(self) -> None:
        """Carries packets until the input has ended."""
        print("ready", flush=True)
        commands = sys.stdin.fileno()
        devices = list(self._devices.values())
        while True:
            timeout_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            readable, _, _ = select.select([commands, *devices], [], [], timeout_s)
            for device in readable:
                if device == commands:
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    self._carry_out(json.loads(line))
                    print("done", flush=True)
                else:
                    self._read(device)
            now_s = time.monotonic()
            while self._late and self._late[0][0] <= now_s:
                _, _, sink, packet = heapq.heappop(self._late)
                self._deliver(sink, packet)

    def remove(self) -> None:
        """Kills what runs in the namespaces, and removes them. Raises nothing."""
        for device in self._devices.values():
            os.close(device)
        for namespace in self._namespaces.values():
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    if pid not in {os.getpid(), self._owner}:
                        os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def _carry_out(self, command: dict[str, str | float]) -> None:
        if "up" in command:
            host = str(command["host"])
            _ip("-n", self._namespaces[host], "link", "set", "net0", "up" if command["up"] else "down")
            return
        pair = tuple(socket.inet_aton(self._addresses[str(command[end])]) for end in ("source", "sink"))
        direction = self._directions[pair]  # type: ignore[index]
        direction.delay, direction.loss = float(command["delay"]), float(command["loss"])

    def _read(self, device: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(device, _MAX_PACKET_BYTES)
            except OSError:
                return
            # IPv4 only: source and destination are in the header.
            direction = self._directions.get((packet[12:16], packet[16:20]))
            if direction is None or packet[0] >> 4 != 4:
                continue
            if direction.loss and self._rng.random() < direction.loss:
                continue
            if direction.delay:
                self._sent += 1
                due_s = time.monotonic() + direction.delay
                heapq.heappush(self._late, (due_s, self._sent, packet[16:20], packet))
            else:
                self._deliver(packet[16:20], packet)

    def _deliver(self, sink: bytes, packet: bytes) -> None:
        # Its device may be down, or its queue full: then the packet is lost, as in any network.
        with contextlib.suppress(OSError):
            os.write(self._devices[sink], packet)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def main() -> None:
    """Runs until the input has ended."""
    # The process at the other end decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seed, prefix, *hosts = sys.argv[1:]
    switch = Switch(int(seed), prefix, hosts)
    try:
        switch.make()
        switch.run()
    finally:
        switch.remove()


if __name__ == "__main__":
    main()
