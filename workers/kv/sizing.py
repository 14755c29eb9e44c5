"""How many pages a worker gets when nobody says."""

from __future__ import annotations

import psutil

# Share of the memory that is free at the time, and the most of it, so that a machine stays usable for others.
_CPU_MEMORY_SHARE = 0.25
_CPU_MAX_BYTES = 4 << 30
# Beyond this a small model would spend more on accounting than on KV.
_MAX_PAGES = 16_384


class KvSizingError(Exception):
    """The pool cannot have the size that was asked for, or any useful one. The message names both."""


def choose_num_pages(asked: int | None, bytes_per_page: int, device_type: str) -> int:
    """The number of pages: the one asked for, or what fits a share of the free memory.

    Raises KvSizingError if that does not fit, or if not a single page does.
    """
    available_bytes = psutil.virtual_memory().available
    if asked is not None:
        if asked * bytes_per_page > available_bytes:
            raise KvSizingError(
                f"kv_blocks = {asked} needs {asked * bytes_per_page >> 20} MiB on {device_type},"
                f" {available_bytes >> 20} MiB are available"
            )
        return asked
    budget_bytes = min(int(available_bytes * _CPU_MEMORY_SHARE), _CPU_MAX_BYTES)
    pages = min(budget_bytes // bytes_per_page, _MAX_PAGES)
    if pages < 1:
        raise KvSizingError(f"no KV page of {bytes_per_page} bytes fits in {budget_bytes} bytes of memory")
    return pages
