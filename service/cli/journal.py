"""`quire journal`: verifies and copies a journal. Never changes it.

That of a running server is read up to what is durable at one moment, while the server goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from service.caches.ledger import CacheState, Ledger
from service.cli.state import unused
from service.data_directory import state_dir
from service.journal.base import JournalUnusable
from service.journal.directory import translate_errors
from service.journal.encoding import Frame
from service.journal.recovery import Recovery, Unrecoverable
from service.journal.segments import (
    END,
    JOURNAL,
    Found,
    boot_id,
    read_end,
    refuse_earlier,
    refused,
    replay,
    segment_path,
)
from service.printable import escaped
from service.setting_rules import POSTGRES
from service.uploads import sync_tree

# Of a running server: it may remove segments that are about to be read, or write to `end` just then.
_ATTEMPTS = 5
_PAUSE_S = 0.1
_T = TypeVar("_T")


@dataclasses.dataclass(slots=True)
class Contents:
    """A recovered journal. `damage`: of its end, which a start would drop."""

    ledger: Ledger
    frames: int
    records: int
    damage: str


def verify(options: argparse.Namespace) -> int:
    """Checks each record and the state that they give. Returns the exit status: 1 if something is wrong."""
    try:
        found = read_journal(_directory(options.directory))
    except JournalUnusable as error:
        return _refused(error)
    problems = [*_broken(found.ledger)]
    if found.damage:
        problems.append(f"the end was not written completely ({found.damage}): a start would drop it")
    for problem in problems:
        print(f"quire: {escaped(problem)}", file=sys.stderr)
    if not problems:
        caches = len(found.ledger)
        print(f"{found.records} records in {found.frames} frames give {caches} caches; all is well")
    return 1 if problems else 0


def backup(options: argparse.Namespace) -> int:
    """Copies a journal to a new directory, with which a server can start. Returns the exit status."""
    target = Path(options.to)
    if os.path.lexists(target):
        return _refused(JournalUnusable(f"{target} exists: name a directory that does not exist yet"))
    made = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(mode=0o700, parents=True)
    try:
        _read(_directory(options.directory), lambda journal, _in_use: _copy(journal, target / JOURNAL))
        with translate_errors(target):
            sync_tree(made[-1])
    except BaseException as error:
        shutil.rmtree(target)
        if isinstance(error, JournalUnusable):
            return _refused(error)
        raise
    size = sum(path.stat().st_size for path in (target / JOURNAL).iterdir())
    print(f"copied {size:,} bytes to {escaped(options.to)}")
    return 0


def read_journal(directory: Path) -> Contents:
    """Recovers the journal in a data directory. Raises JournalUnusable."""

    def read(journal: Path, in_use: bool) -> Contents:
        ledger = Ledger()
        recovery = Recovery(
            lambda record, _wall_s: ledger.apply(record), lambda run, _wall_s: ledger.apply_run(run)
        )
        found = _replay(journal, recovery.add)
        try:
            recovery.end()
        except Unrecoverable as error:
            raise refused(journal, journal, str(error)) from None
        # A server may be writing at the end just now.
        damage = "" if in_use else found.damage
        return Contents(ledger, recovery.frames, recovery.records, damage)

    return _read(directory, read)


def _copy(source: Path, target: Path) -> None:
    """Copies all frames, each of which is checked. Raises JournalUnusable, OSError."""
    found = _replay(source, lambda _frame: None)
    with translate_errors(target):
        target.mkdir(mode=0o700, exist_ok=True)
        for number in range(found.end.first_segment, found.segment + 1):
            path = segment_path(target, number)
            with segment_path(source, number).open("rb") as original, _private(path) as copy:
                shutil.copyfileobj(original, copy)
                if number == found.segment:
                    copy.truncate(found.size_bytes)
        last = found.next_number - 1
        with _private(target / END) as file:
            file.write(found.end._replace(written=last, synced=last, boot=boot_id()).encoded())


def _private(path: Path) -> BinaryIO:
    """A file for its owner only, which is made, or emptied. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _read(directory: Path, read: Callable[[Path, bool], _T]) -> _T:
    """`read` gets the directory of the journal, and whether a server uses it. Raises JournalUnusable."""
    journal = directory / JOURNAL
    with translate_errors(journal), unused(directory) as is_unused:
        refuse_earlier(directory)
        if not journal.is_dir():
            shards = [str(one.parent) for one in sorted(directory.glob(f"shards/*/{JOURNAL}"))]
            named = f"one of {', '.join(shards)}" if shards else "a server's data directory"
            raise JournalUnusable(f"{directory} has no journal: name {named}")
        for _ in range(0 if is_unused else _ATTEMPTS):
            with contextlib.suppress(JournalUnusable, OSError):
                return read(journal, True)
            time.sleep(_PAUSE_S)
        return read(journal, not is_unused)


def _replay(journal: Path, on_frame: Callable[[Frame], None]) -> Found:
    """Raises JournalUnusable, OSError."""
    # First, since all that it names is in the segments by then.
    end = read_end(journal)
    found = replay(journal, end, end.must_exist(), on_frame)
    if found is None:
        raise JournalUnusable(f"{journal} has no segments")
    return found


def _refused(error: JournalUnusable) -> int:
    print(f"quire: {escaped(str(error))}", file=sys.stderr)
    return 1


def _directory(name: str) -> Path:
    """A data directory by its path, or by its name in `quire state list`. Raises JournalUnusable."""
    if name.startswith(POSTGRES):
        raise JournalUnusable(
            "a journal in PostgreSQL is not read by this command: use psql, or pg_dump for a copy"
        )
    named = state_dir() / name
    return named if not Path(name).exists() and named.is_dir() else Path(name)


def _broken(ledger: Ledger) -> Iterator[str]:
    """What is wrong with a recovered state, beyond what its records say themselves."""
    holders: Counter[int] = Counter()
    ids = Counter(state.cache_id for state in ledger)
    for state in ledger:
        problem = _broken_state(state)
        if ids[state.cache_id] > 1:
            problem = "another cache has the same id"
        if problem:
            yield f"cache {state.cache_id} (number {state.number}): {problem}"
        holders.update(map(id, state.tokens.segments))
    if any(holders[id(segment)] != segment.holders for s in ledger for segment in s.tokens.segments):
        yield "tokens are shared by another number of caches than was counted"
    if ledger.adapters != Counter(state.adapter for state in ledger if state.adapter):
        yield "the caches of adapters were miscounted"


def _broken_state(state: CacheState) -> str:
    if sum(len(segment.token_ids) for segment in state.tokens.segments) != state.length:
        return "its tokens are not as many as its length says"
    if state.prompt_len > state.length:
        return f"{state.prompt_len} of {state.length} tokens are prompt"
    if state.last_base is not None and state.last_base + state.last_kept != state.length:
        return "its last append does not end where its tokens do"
    if not 0 < state.lease_s < math.inf:
        return f"its lease is {state.lease_s} s"
    return ""
