"""What of this machine makes a server slow, or will soon end it: warnings when it starts, with what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from service.config import Config
from service.data_directory import data_directory
from service.logging import get_logger
from service.uploads import RESERVE_BYTES

_log = get_logger(__name__)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def warn_of_machine(config: Config) -> None:
    """Looks at the disk and, unless the workers are elsewhere, at cores and huge pages."""
    for problem, advice in _problems(config):
        _log.warning(problem, advice=advice)


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    directory = data_directory(config)
    if directory is not None and directory.is_dir() and shutil.disk_usage(directory).free < RESERVE_BYTES:
        yield "little is free on the disk of the data directory", f"have {RESERVE_BYTES >> 20} MiB, or more"
    if config.has_remote_workers:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (config.threads_per_worker or 0) * config.worker_slots > cores:
        yield "there are more compute threads than cores", "lower threads_per_worker, or leave it out"
    try:
        never = "[never]" in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return
    if never:
        yield "huge pages are switched off", f"as root: echo madvise > {_HUGE_PAGES}"
