"""Writes a journal with the code of another commit, for tests/service/test_earlier_journals.py.

    git archive COMMIT service | tar -x -C CHECKOUT
    PYTHONPATH=CHECKOUT python tests/service/journals/write.py tests/service/journals/format-N N

Format 1 was written by cbd3b4d, 2 by a2ac918, 3 by 51c3690, 4 by 8d1077b. The code of format 2 wrote caches
of loaded weights as records of format 1. The lock and the id of the machine's boot are left out.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Child,
    ForkKey,
    LastAppend,
    LeaseRenewed,
    Record,
    TokensAppended,
)
from service.journal import files
from service.journal.sqlite import open_journal


def _created(number: int, cache_id: str, tenant: str = "", **more: int) -> Record:
    return CacheCreated(
        number=number, cache_id=cache_id, tenant=tenant, salt=b"salt", seed=number, lease_s=600.0,
        request_id=f"request-{number}", **more,
    )  # fmt: skip


def _appended(number: int, position: int, *tokens: int, accept: int = 0, asked: bytes = b"") -> Record:
    return TokensAppended(
        number=number, position=position, token_ids=tokens, prompt_len=min(position, 4) or len(tokens),
        ownership=1, accept=accept, asked=asked,
    )  # fmt: skip


def _restated(number: int, cache_id: str, shares_with: int, shared: int, *tokens: int, **more: int) -> Record:
    last = LastAppend(base=shared + len(tokens) - 1, kept=1, accept=0, asked=b"")
    return CacheRestated(
        number=number, cache_id=cache_id, tenant="bob", salt=b"", seed=number, lease_s=900.0, request_id="",
        prompt_len=2, ownership=3, last=last,
        fork=ForkKey(request_id="f", parent=1, index=0, count=1) if shares_with else None,
        shares_with=shares_with, shared_len=shared, token_ids=tokens, **more,
    )  # fmt: skip


def commits(format_: int) -> list[list[Record]]:
    """What is written, each list at once."""
    written: list[list[Record]] = [
        [_restated(1, "kv_restated", 0, 0, 20, 21, 22), _restated(2, "kv_sharing", 1, 2, 23)],
        [_created(3, "kv_chat", "alice"), _appended(3, 0, 5, 6, 7, 8)],
        [_created(4, "kv_verified"), _appended(4, 0, 1, 2, 3, 4)],
        [_appended(3, 4, 9), _appended(4, 4, 5, 6, accept=1, asked=b"sixteen bytes ..")],
        [_appended(3, 5, 10)],
        [_appended(3, 6, 11)],
        [CacheTruncated(number=3, new_len=6)],
        [CacheForked(parent=3, children=(Child(number=5, cache_id="kv_fork", seed=5),), request_id="f")],
        [_appended(5, 6, 12), LeaseRenewed(number=4, lease_s=1200.0)],
        [_created(6, "kv_released"), _appended(6, 0, 1)],
        [CacheReleased(number=6)],
    ]
    if format_ >= 2:
        written += [
            [
                CacheForked(
                    parent=parent, children=(Child(number, f"kv_together_{first}", number),), request_id="t",
                    total=2, first=first,
                )
                for first, (parent, number) in enumerate([(3, 7), (4, 8)])
            ],
            [_created(9, "kv_weights", weights=1), _appended(9, 0, 30, 31)],
            [_restated(10, "kv_restated_weights", 0, 0, 32, 33, weights=1)],
        ]  # fmt: skip
    if format_ >= 4:
        written += [
            [_created(11, "kv_adapter", adapter=3), _appended(11, 0, 40)],
            [_restated(12, "kv_restated_adapter", 0, 0, 41, weights=1, adapter=4)],
        ]
    return written


async def _write(directory: Path, format_: int) -> None:
    journal = open_journal(directory)
    journal.bind_model("fingerprint")
    for records in commits(format_):
        done = asyncio.get_running_loop().create_future()
        journal.commit(records, done.set_result)
        assert await done
    journal.close()


if __name__ == "__main__":
    files._boot_id = lambda: bytes(16)
    asyncio.run(_write(Path(sys.argv[1]), int(sys.argv[2])))
    Path(sys.argv[1], "lock").unlink()
