"""What this machine has, without torch: `python -m service.cli.probes` prints a line of JSON for each.

The probes run in a process of their own (`doctor`), because a disk or a resolver may never answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from service.auth.connections import TooFewDescriptors, with_descriptors
from service.cli.state import unused
from service.config import Config
from service.config_sources import read_settings
from service.data_directory import data_directories, data_directory, state_dir
from service.logging import configure_logging
from service.uploads import RESERVE_BYTES
from workers.common.addresses import ADDRESS_IS_FREE, IN_USE, why_not_listening

OK, SLOW, PROBLEM = "ok", "slow", "problem"
_DISTRIBUTION = "quire-llm-server"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its size is asked for
GIB = 1 << 30
_SYNCS = 20
# A commit of the journal in full durability waits so long, and a decode step of a small model takes 30 ms.
_SLOW_SYNC_S = 0.01
_TIMEX_BYTES, _TIME_ERROR = 256, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A line of the table, and what to do if it is not ok. A problem prevents serving."""

    name: str
    state: str
    text: str
    advice: str = ""


def _python(_: Config) -> Iterator[Finding]:
    """Compares with the versions that the distribution asks for, which are those that were tested."""
    version = platform.python_version()
    try:
        wanted = importlib.metadata.metadata(_DISTRIBUTION)["Requires-Python"] or ""
        needed = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("python", PROBLEM, f"{version}; {_DISTRIBUTION} is not installed", "run `make setup`")
        return
    bad = [] if version in SpecifierSet(wanted) else [f"Python {version} is not {wanted}"]
    required = [Requirement(line) for line in needed]
    applying = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in applying:
        try:
            found = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            bad.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(found, prereleases=True):
            bad.append(f"{one.name} {found} is not {one.specifier}")
    if bad:
        yield Finding("python", PROBLEM, f"{version}; {'; '.join(bad)}", "install as README.md says")
    else:
        yield Finding("python", OK, f"{version}, with {len(applying)} libraries in the tested versions")


def _huge_pages(_: Config) -> Iterator[Finding]:
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text(encoding="ascii"))
    except OSError:
        chosen = None
    if chosen is None:
        advice = "nothing: this system has no transparent huge pages"
        yield Finding("huge pages", SLOW, "the kernel has none", advice)
    elif chosen[1] == "never":
        advice = f"as root: echo madvise > {_HUGE_PAGES}; weights and KV pages are read faster from them"
        yield Finding("huge pages", SLOW, "switched off (never)", advice)
    else:
        yield Finding("huge pages", OK, chosen[1])


def _shared_memory(_: Config) -> Iterator[Finding]:
    text = "none"
    with contextlib.suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        text = f"{found.f_bavail * found.f_frsize / GIB:.1f} GiB free"
    yield Finding(_SHARED_MEMORY, OK, f"{text}; Quire does not use it")


def _files(config: Config) -> Iterator[Finding]:
    try:
        possible = with_descriptors(config).max_connections
    except TooFewDescriptors as error:
        yield Finding(
            "open files", PROBLEM, str(error), "raise the limit: ulimit -n, or LimitNOFILE of systemd"
        )
        return
    if possible < config.max_connections:
        advice = "raise the limit: ulimit -n, or LimitNOFILE of systemd; or lower --max-connections"
        text = f"enough for {possible} connections, and max_connections is {config.max_connections}"
        yield Finding("open files", SLOW, text, advice)
    else:
        yield Finding("open files", OK, f"enough for {possible} connections")


def _is_running(config: Config) -> bool:
    """Whether a server at this address runs, of any model: it holds a lock in its data directory."""
    own = data_directory(config)
    default = data_directory(dataclasses.replace(config, data_dir=None))
    directories = [] if own is None else [own]
    if default is not None:
        of_address = default.name.rpartition("-")[0]
        with contextlib.suppress(OSError):
            directories += [one for one in data_directories() if one.name.rpartition("-")[0] == of_address]
    for directory in directories:
        # That of another user cannot be read.
        with contextlib.suppress(OSError), unused(directory) as is_unused:
            if not is_unused:
                return True
    return False


def _addresses(config: Config) -> Iterator[Finding]:
    is_running = _is_running(config)
    for _, _, address in config.addresses():
        if address.startswith("unix:"):
            yield Finding("address", OK, address)
            continue
        problem = why_not_listening(address)
        if problem == ADDRESS_IS_FREE:
            yield Finding("address", OK, f"{address} is free")
        elif problem == IN_USE and is_running:
            yield Finding("address", OK, f"{address} is that of the running server")
        else:
            yield Finding("address", PROBLEM, f"{address}: {problem}", "`ss -ltnp` shows what uses it")


def _clock(_: Config) -> Iterator[Finding]:
    text = f"monotonic to {time.get_clock_info('monotonic').resolution * 1e9:g} ns"
    with contextlib.suppress(OSError, AttributeError):
        # With all zeros it asks, and changes nothing.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        known = {_TIME_ERROR: "; the kernel does not know whether it is synchronized", -1: ""}
        text += known.get(state, "; synchronized (NTP)")
    yield Finding("clock", OK, text)


def _disk(config: Config) -> Iterator[Finding]:
    directory = data_directory(config) or state_dir()
    # Path.is_dir raises if a directory of the path cannot be read.
    there = next(path for path in (directory, *directory.parents) if os.path.isdir(path))  # noqa: PTH112
    advice = "name a directory that this user can write to with --data-dir"
    try:
        free_bytes = (found := os.statvfs(there)).f_bavail * found.f_frsize
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            taken_s = sorted(_sync_s(file.fileno()) for _ in range(_SYNCS))
    except OSError as error:
        yield Finding("disk", PROBLEM, f"{there}: {error.strerror}", advice)
        return
    text = f"{free_bytes / GIB:.1f} GiB free in {there}"
    if free_bytes < RESERVE_BYTES:
        yield Finding("disk", SLOW, text, f"free some, or {advice}: without room appends are refused")
    else:
        yield Finding("disk", OK, text)
    median_s = statistics.median(taken_s)
    text = f"{1e3 * median_s:.2f} ms to sync a write (worst of {_SYNCS}: {1e3 * taken_s[-1]:.2f})"
    if median_s > _SLOW_SYNC_S:
        advice = (
            "with --journal-sync full each append waits for it: use a faster disk (--data-dir), or normal"
        )
        yield Finding("fsync", SLOW, text, advice)
    else:
        yield Finding("fsync", OK, text)


def _sync_s(descriptor: int) -> float:
    """How long it takes until a page is on disk."""
    os.write(descriptor, bytes(4096))
    began_s = time.perf_counter()
    os.fsync(descriptor)
    return time.perf_counter() - began_s


PROBES: Mapping[str, Callable[[Config], Iterator[Finding]]] = {
    "python": _python,
    "huge pages": _huge_pages,
    _SHARED_MEMORY: _shared_memory,
    "open files": _files,
    "clock": _clock,
    "address": _addresses,
    "disk": _disk,
}


def main() -> None:
    """Prints what the probes find. The arguments are the server's file, or "", and the probes' names."""
    configure_logging("error")
    path, *names = sys.argv[1:]
    config = read_settings({"config": path}, os.environ).config
    for name in names:
        for finding in PROBES[name](config):
            print(json.dumps(dataclasses.asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
