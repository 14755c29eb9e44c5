"""`quire journal`: looks into a journal, verifies, exports and copies it. Never changes it.

The journal of a stopped server is copied while it is locked, that of a running one as SQLite shows it to
readers: with all commits up to one moment. Then the copy is recovered, as a server does at its start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from service.caches.ledger import CacheState, Ledger
from service.caches.records import Record, TokensAppended
from service.cli.state import unused
from service.data_directory import state_dir
from service.journal.base import JournalUnusable
from service.journal.files import DATABASE, HIGH_WATER_MARK, first_seq, translate_errors
from service.journal.sqlite import open_journal
from service.logging import configure_logging
from service.printable import escaped
from service.setting_rules import POSTGRES
from service.uploads import sync_tree

_NAMES_SHOWN = 20
# Of the table, where those of the JSON say too little.
_NAMES = {"size_bytes": "bytes of rows", "memory_bytes": "of max_journal_bytes"}


@dataclasses.dataclass(slots=True)
class Contents:
    """A recovered journal.

    Attributes:
        in_use: A server was using the directory.
        format: Of the tables.
        rows, dropped_rows: How many there are, and how many of these a start would drop, as they are damaged.
        written_s: Unix times of the oldest and the newest row.
        model_tag: Of the weights of the newest caches, see `service.pool.model_versions`.
    """

    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    in_use: bool = False
    format: int = 0
    rows: int = 0
    dropped_rows: int = 0
    records: int = 0
    size_bytes: int = 0
    written_s: tuple[float, float] | None = None
    model_tag: str | None = None


def inspect(options: argparse.Namespace) -> int:
    """Prints what is in a journal. Returns the exit status."""
    found = _contents(options)
    ledger = found.ledger
    tenants = Counter(state.tenant for state in ledger)
    oldest, newest = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for at in found.written_s or (0.0, 0.0)
    )
    facts = {
        "format": found.format,
        "in_use": found.in_use,
        "rows": found.rows,
        "records": found.records,
        "size_bytes": found.size_bytes,
        "caches": len(ledger),
        "tokens": sum(state.length for state in ledger),
        "longest_tokens": max((state.length for state in ledger), default=0),
        "memory_bytes": ledger.size_bytes,
        "oldest": oldest if found.written_s else None,
        "newest": newest if found.written_s else None,
        "tenants": dict(tenants.most_common()),
        "adapters": {str(number): count for number, count in ledger.adapters.most_common()},
        "weights": {str(number): n for number, n in Counter(s.weights for s in ledger).most_common()},
    }
    if options.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        shown = _counts(value, "" if name == "tenants" else "number ") if isinstance(value, dict) else value
        print(escaped(f"{_NAMES.get(name, name.replace('_', ' ')):21} {shown}"))
    return 0


def _counts(numbers: Mapping[str, int], prefix: str) -> str:
    """The first names with the caches of each."""
    shown = [
        f"{f'{prefix}{name}' if name else 'no tenant'}: {count} cache{'s' if count != 1 else ''}"
        for name, count in numbers.items()
    ]
    more = [f"and {len(shown) - _NAMES_SHOWN} more"] if len(shown) > _NAMES_SHOWN else []
    return ", ".join(shown[:_NAMES_SHOWN] + more) or "none"


def verify(options: argparse.Namespace) -> int:
    """Checks each record and the state that they give. Returns the exit status: 1 if something is wrong."""
    found = _contents(options)
    problems = [*_broken(found.ledger)]
    if found.dropped_rows:
        problems.append("the last row is damaged: a start would drop it, and lose the commits in it")
    for problem in problems:
        print(f"quire: {escaped(problem)}", file=sys.stderr)
    if not problems:
        print(f"{found.records} records in {found.rows} rows give {len(found.ledger)} caches; all is well")
    return 1 if problems else 0


def export(options: argparse.Namespace) -> int:
    """Prints a line of JSON for each cache. Returns the exit status."""
    for state in sorted(_contents(options).ledger, key=lambda state: state.number):
        line = {
            "id": state.cache_id,
            "tenant": state.tenant,
            "tokens": state.tokens.copy().tolist(),
            "prompt_tokens": state.prompt_len,
            "adapter": state.adapter,
            "weights": state.weights,
            "lease_s": state.lease_s,
        }
        print(json.dumps(line))
    return 0


def backup(options: argparse.Namespace) -> int:
    """Copies a journal to a new directory, with which a server can start. Returns the exit status."""
    if os.path.lexists(options.to):
        return _refused(JournalUnusable(f"{options.to} exists: name a directory that does not exist yet"))
    target = Path(options.to)
    made = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(mode=0o700, parents=True)
    try:
        _copy(_directory(options.directory), target)
        sync_tree(made[-1])
    except BaseException as error:
        shutil.rmtree(target)
        if isinstance(error, JournalUnusable):
            return _refused(error)
        raise
    print(f"copied {sum(path.stat().st_size for path in target.iterdir()):,} bytes to {escaped(options.to)}")
    return 0


def read_journal(directory: Path) -> Contents:
    """Recovers a copy of the journal in a directory. Raises JournalUnusable."""
    found = Contents()
    with tempfile.TemporaryDirectory(prefix="quire-journal-") as name:
        copy = Path(name)
        found.in_use = _copy(directory, copy)

        def apply(record: Record, _wall_s: float) -> None:
            found.ledger.apply(record)
            found.records += 1

        def apply_run(run: TokensAppended, _wall_s: float) -> None:
            found.ledger.apply_run(run)
            found.records += len(run.token_ids)

        try:
            with contextlib.closing(open_journal(copy)) as journal, translate_errors(copy / DATABASE):
                _count(copy, found)
                rows = found.rows
                found.model_tag = journal.model_fingerprint
                journal.recover(apply, apply_run)
                found.size_bytes = journal.size_bytes
        except JournalUnusable as error:
            # The advice is about the original.
            raise JournalUnusable(str(error).replace(str(copy), str(directory))) from None
        _count(copy, found)
        found.dropped_rows = rows - found.rows
    return found


def _contents(options: argparse.Namespace) -> Contents:
    """Raises SystemExit with 1, after a line that says why, if the journal cannot be read."""
    configure_logging("error", "pretty", sys.stderr)
    try:
        return read_journal(_directory(options.directory))
    except JournalUnusable as error:
        raise SystemExit(_refused(error)) from None


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


def _copy(directory: Path, target: Path) -> bool:
    """Copies the files of a journal. Whether a server is using it. Raises JournalUnusable."""
    path, copy_path = directory / DATABASE, target / DATABASE
    with translate_errors(path), contextlib.ExitStack() as stack:
        if not path.is_file():
            raise JournalUnusable(f"{directory} has no {DATABASE}: name a server's data directory")
        is_unused = stack.enter_context(unused(directory))
        # For their owner only, as the original.
        os.close(os.open(copy_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if is_unused:
            for name in (DATABASE, f"{DATABASE}-wal", HIGH_WATER_MARK):
                if (directory / name).exists():
                    shutil.copy(directory / name, target / name)
            return False
        # A reader of a database that another process has open changes nothing.
        with (
            contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(copy_path)) as copy,
        ):
            try:
                source.backup(copy)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_FULL":
                    raise
                raise OSError(errno.ENOSPC, str(error), copy_path) from error
        return True


def _count(directory: Path, found: Contents) -> None:
    """Reads what only the tables say. Raises sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(directory / DATABASE)) as db:
        (found.format,) = db.execute("PRAGMA user_version").fetchone()
        query = "SELECT count(*), min(wall_ns), max(wall_ns) FROM log WHERE seq >= ?"
        found.rows, *walls_ns = db.execute(query, (first_seq(db),)).fetchone()
    if found.rows:
        found.written_s = walls_ns[0] / 1e9, walls_ns[1] / 1e9


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
