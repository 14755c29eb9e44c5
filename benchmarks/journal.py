"""The cost of the journal: `python -m benchmarks.journal [--directory DIR] [--postgres URL]`.

Prints JSON: how long a turn of 32 decodes waits for its commit, with an event loop that has nothing else to
do and with one that is busy, and what it takes of the CPU; how many turns a second can be written; and how
long N tokens take to be recovered, as they were decoded, as prompts, and mixed.
Files lie in DIR, whose disk decides much. `--postgres` also measures commits in an empty database.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from service.caches.ledger import Ledger
from service.caches.records import CacheCreated, Record, TokensAppended
from service.journal.base import Journal
from service.journal.encoding import decode, encode, read_frames, seal, seed_of
from service.journal.file_journal import FileJournal
from service.journal.recovery import Recovery
from service.journal.segment_writer import Segments
from service.journal.segments import JOURNAL, Sync
from service.journal.stored import StoredJournal

_CALLERS = 32
_TURNS = 2000
# The pause between commits, as of a model with this step time.
_STEP_S = 0.002
# The duration of one callback of the busy event loop.
_WORK_S = 0.0005
_PROMPT_TOKENS = 4000
_DECODED_TOKENS = 500


def _created(number: int) -> CacheCreated:
    return CacheCreated(number, f"{number:032x}", "tenant", b"0123456789abcdef", number, 600.0, "")


def turn(first_number: int, position: int) -> list[Record]:
    """One token of each caller."""
    token = (position * 7919 % 150_000,)
    return [TokensAppended(first_number + i, position, token, 0, 1) for i in range(_CALLERS)]


def _percentiles_us(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    places = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: ordered[int(place * (len(ordered) - 1))] for name, place in places.items()}
    return {name: round(1e6 * value, 1) for name, value in (found | {"max": ordered[-1]}).items()}


def _per_call_us(call: Callable[[], object], times: int = 2000) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return round(1e6 * (time.perf_counter() - start) / times, 2)


def encoding() -> dict[str, float]:
    """The encoded records of an event-loop tick."""
    records = turn(1, 100)
    payload, seed = encode(records), seed_of(b"a segment")
    frame = seal([payload], 1, 1, seed)
    return {
        "encode_us": _per_call_us(lambda: encode(records)),
        "seal_us": _per_call_us(lambda: seal([payload], 1, 1, seed)),
        "read_us": _per_call_us(lambda: list(read_frames(io.BytesIO(frame), len(frame), seed))),
        "decode_us": _per_call_us(lambda: list(decode(payload))),
        "frame_bytes": len(frame),
    }


@contextlib.asynccontextmanager
async def _opened(place: Path | str, sync: Sync = "normal") -> AsyncIterator[StoredJournal]:
    """A journal in a directory, or in the database of this address."""
    if isinstance(place, Path):
        with contextlib.closing(_open(place, sync)) as journal:
            running = asyncio.create_task(journal.run())
            yield journal
            running.cancel()
        return
    from service.extensions.gateways.postgres.database import Database  # noqa: PLC0415 - an extra
    from service.extensions.gateways.postgres.journal import PostgresJournal  # noqa: PLC0415
    from service.extensions.gateways.postgres.leases import Leases  # noqa: PLC0415

    table, leases_table = Database(place), Database(place)
    leases = Leases(leases_table, "benchmark", address="")
    await table.prepare()
    lease = await leases.acquire(0)
    assert lease is not None, "another gateway uses the database"
    opened = PostgresJournal(table, leases, lease)
    await opened.recover(lambda *_: None)
    running = asyncio.create_task(opened.run())
    yield opened
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    leases_table.terminate()


async def commits(place: Path | str, sync: Sync, *, busy: bool = False) -> dict[str, Any]:
    """Turns, each of which waits for its commit, with a pause before the next."""
    waits: list[float] = []
    async with _opened(place, sync) as journal:
        work = asyncio.create_task(_work()) if busy else None
        await _commit(journal, [_created(1 + i) for i in range(_CALLERS)])
        for position in range(_TURNS if sync == "normal" else _TURNS // 10):
            records = turn(1, position)
            start = time.perf_counter()
            await _commit(journal, records)
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(_STEP_S)
        if work is not None:
            work.cancel()
    return {"turns": len(waits), "wait_us": _percentiles_us(waits)}


async def throughput(place: Path | str, sync: Sync = "normal") -> dict[str, float]:
    """The throughput of commits one by one, and queued."""
    async with _opened(place, sync) as journal:
        await _commit(journal, [_created(1 + i) for i in range(_CALLERS)])
        turns = [turn(1, position) for position in range(2 * _TURNS)]
        start, cpu_start = time.perf_counter(), time.process_time()
        for records in turns[:_TURNS]:
            await _commit(journal, records)
        one_by_one_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        start = time.perf_counter()
        await asyncio.gather(*(_commit(journal, records) for records in turns[_TURNS:]))
        at_once_s = time.perf_counter() - start
    return {
        "cpu_us_per_commit": round(1e6 * cpu_s / _TURNS, 1),
        "turns_per_s_one_by_one": round(_TURNS / one_by_one_s),
        "tokens_per_s_one_by_one": round(_CALLERS * _TURNS / one_by_one_s),
        "turns_per_s_at_once": round(_TURNS / at_once_s),
    }


def decoded(tokens: int) -> Iterator[list[Record]]:
    """Frames with one token of each caller. New callers replace finished ones."""
    first, position = 1, 0
    for index in range(tokens // _CALLERS):
        first, position = 1 + index // _DECODED_TOKENS * _CALLERS, index % _DECODED_TOKENS
        new: list[Record] = [_created(first + i) for i in range(_CALLERS)] if position == 0 else []
        yield new + turn(first, position)


def prompts(tokens: int, first: int = 1) -> Iterator[list[Record]]:
    """Frames with one prompt each."""
    prompt = array("I", range(_PROMPT_TOKENS))
    for number in range(first, first + tokens // _PROMPT_TOKENS):
        yield [_created(number), TokensAppended(number, 0, prompt, _PROMPT_TOKENS, 1)]


def mixed(tokens: int) -> Iterator[list[Record]]:
    """Half of each, alternating in small parts."""
    rest = prompts(tokens // 2, first=10_000_000)
    every = _PROMPT_TOKENS // _CALLERS
    for index, row in enumerate(decoded(tokens // 2)):
        yield row
        if index % every == 0:
            yield from (row for row in (next(rest, None),) if row is not None)


def recovery(directory: Path, rows: Iterator[list[Record]], tokens: int) -> dict[str, Any]:
    """The recovery time, three times. The files were just written, and are in the page cache."""
    segments = _written(directory)
    count = 0
    for records in rows:
        segments.append([encode(records)])
        count += 1
    segments.close()
    times: list[float] = []
    found = 0
    for _ in range(3):
        gc.collect()
        ledger = Ledger()
        start = time.perf_counter()
        journal = _open(directory, ledger=ledger)
        times.append(round(time.perf_counter() - start, 3))
        found = sum(state.length for state in ledger)
        journal.close()
    size = _size(directory)
    return {
        "tokens": found,
        "frames": count,
        "s": times,
        "file_bytes": size,
        "file_bytes_per_token": round(size / tokens, 1),
    }


def _open(directory: Path, sync: Sync = "normal", ledger: Ledger | None = None) -> FileJournal:
    found = Ledger() if ledger is None else ledger
    return FileJournal(directory, lambda record, _: found.apply(record), sync)


def _written(directory: Path) -> Segments:
    return Segments(directory, "normal", Recovery(lambda *_: None))


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / JOURNAL).iterdir())


async def _commit(journal: Journal, records: list[Record]) -> None:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    journal.commit(records, outcome.set_result)
    assert await outcome


async def _work() -> None:
    """Holds the GIL, except for short moments."""
    while True:
        until = time.perf_counter() + _WORK_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--postgres", default="", metavar="URL")
    parser.add_argument("--commits-only", action="store_true")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    options = parser.parse_args()
    with (
        machine.report() as found,
        tempfile.TemporaryDirectory(prefix="journal-", dir=options.directory) as directory,
    ):
        base = Path(directory)
        found["turn"], found["encoding"] = _CALLERS, encoding()
        if options.postgres:
            # Beside files with the same durability. Each creates the same caches: on disk in its own journal.
            same = (base / "same_idle", base / "same_busy", base / "same_throughput")
            for name, places in (("postgres", (options.postgres,) * 3), ("disk_sync_full", same)):
                found[f"commit_{name}"] = asyncio.run(commits(places[0], "full"))
                found[f"commit_{name}_busy_loop"] = asyncio.run(commits(places[1], "full", busy=True))
                found[f"throughput_{name}"] = asyncio.run(throughput(places[2], "full"))
        found["commit"] = asyncio.run(commits(base / "idle", "normal"))
        found["commit_busy_loop"] = asyncio.run(commits(base / "busy", "normal", busy=True))
        found["commit_sync_full"] = asyncio.run(commits(base / "full", "full"))
        found["throughput"] = asyncio.run(throughput(base / "throughput"))
        if not options.commits_only:
            for name, rows in (("decoded", decoded), ("prompts", prompts), ("mixed", mixed)):
                found[f"recovery_{name}"] = recovery(base / name, rows(options.tokens), options.tokens)


if __name__ == "__main__":
    main()
