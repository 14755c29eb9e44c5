"""A shard, as its core begins with it: which part of all caches it is, and what its journal had.

A gateway that is the only one has the only shard.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path

from service.caches.admission import Limits
from service.caches.ledger import RecordConflict
from service.caches.machine import CacheMachine
from service.caches.records import Record
from service.config import Config
from service.data_directory import check_own_journal
from service.journal.base import Journal, JournalUnusable
from service.journal.clock_settings import ClockSettings
from service.journal.encoding import UnknownRecord
from service.journal.file_journal import FileJournal
from service.journal.recovery import Apply
from service.journal.segments import Sync
from service.lease import FencedLease
from service.logging import get_logger

_log = get_logger(__name__)
_RANDOM_BYTES = 18
_ID = re.compile(r"kv(\d{1,6})_", re.ASCII)

# Opens the journal of a shard, and applies its records. Is given the settings, and the directory of the shard
# (None: it has none). Raises JournalUnusable, ConfigError, or what decoding and applying records raises.
OpenJournal = Callable[[Config, Path | None, Apply], Awaitable[Journal]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of all caches. With one, ids name none: `kv_...`. Otherwise `kv3_...`."""

    index: int = 0
    count: int = 1

    @property
    def prefix(self) -> str:
        return f"kv{self.index}_" if self.count > 1 else "kv_"

    def new_cache_id(self) -> str:
        return self.prefix + secrets.token_urlsafe(_RANDOM_BYTES)

    def workers(self, total: int) -> range:
        """Its share of the workers, by their indexes among all."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)


def shard_of(cache_id: str) -> int | None:
    """The shard that an id names. None: it names none."""
    named = _ID.match(cache_id)
    return None if named is None else int(named[1])


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard that was opened, with which a core begins.

    Attributes:
        caches: Those that were read from the journal.
        directory: Where further state is. None: nothing else survives the process.
        lease: By which its workers know the gateways of the shard. None: by the directory.
    """

    shard: Shard
    caches: CacheMachine
    journal: Journal
    directory: Path | None = None
    lease: FencedLease | None = None


async def open_shard(
    config: Config,
    open_journal: OpenJournal,
    directory: Path | None,
    shard: Shard = Shard(),
    lease: FencedLease | None = None,
) -> OpenShard:
    """Opens a shard with what its journal has. Raises JournalUnusable or ConfigError."""
    # Limits are settings of the same names.
    limits = Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})
    caches, start_s = CacheMachine(limits, new_cache_id=shard.new_cache_id), time.monotonic()
    clock = ClockSettings()

    def apply(record: Record, wall_s: float) -> None:
        caches.recovering(record, clock.as_set_now(record, wall_s))

    try:
        journal = await open_journal(config, directory, apply)
    except (RecordConflict, UnknownRecord) as error:
        raise JournalUnusable(f"its records do not fit: {error}") from None
    if number := len(caches.ledger):
        took_ms = round(1e3 * (time.monotonic() - start_s))
        named = {"shard": shard.index} if shard.count > 1 else {}
        kind = "disk" if config.journal == "auto" else config.journal  # One in memory has no caches yet.
        _log.info("recovered", caches=number, journal=kind, took_ms=took_ms, **named)
    if lease is not None:
        caches.admission.lease = lease
    return OpenShard(shard, caches, journal, directory, lease)


async def open_own_journal(config: Config, directory: Path | None, apply: Apply) -> Journal:
    """Opens a journal that no extension brings; without a directory nothing is stored. See `OpenJournal`."""
    check_own_journal(config, directory)
    if directory is None:
        return Journal()
    sync: Sync = "full" if config.journal == "disk-fsync" else "normal"
    return FileJournal(directory, apply, sync)
