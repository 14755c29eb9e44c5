"""Pages of KV as files: how they are written, read and checked. Recurrent states are files of the same kind.

A page's digest says which tokens and which salt it has the keys and values of (`page_pool`), the *identity*
which weights, code and layout (`workers.models.kv_identity`). A file begins with both and checksums of the
page, so that whatever has happened to it, it is either what its name says or it is refused: also a page that
a crash of the machine tears. The checksums find accidents; who could write other ones could as well write to
the memory of the worker.

Where files are, and which ones are deleted, is of `page_directory`. Blocks for as long as the disk does:
`disk_threads` has the threads. Knows no states of pages: see `disk_pages`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Sequence

from workers.kv.disk_pages import PageWrite, ReadOutcome
from workers.kv.page_directory import IDENTITY_BYTES, PageDirectory

_MAGIC = b"QUIREKV1"
# Magic, identity, digest. Then the CRC-32 of each piece of memory: the keys or the values of a layer, or a
# tensor of a state.
_HEADER = struct.Struct("<8s16s17s")
# Buffers of one call; Linux takes 1024.
_MOST_BUFFERS = 512


class PageFiles:
    """The files of one identity. Every method may raise OSError.

    `read` may be called from any thread, the others from one at a time.
    """

    def __init__(self, directory: PageDirectory, identity: bytes) -> None:
        """Nothing is read or written yet.

        Args:
            directory: Where they are.
            identity: What pages are only valid for: IDENTITY_BYTES.
        """
        self._directory, self._identity = directory, identity

    @property
    def size_bytes(self) -> int:
        """The size of all files as last known, including those of other identities."""
        return self._directory.size_bytes

    def write(self, write: PageWrite, views: Sequence[memoryview]) -> bool:
        """Store a page. False: it is stale, there is no room, or another process writes for too long."""

        def fill(descriptor: int) -> bool:
            _write_all(descriptor, [memoryview(self._header(write.digest, views)), *views])
            return not write.is_stale

        return self._directory.store(self._identity + write.digest, write.parent, _file_bytes(views), fill)

    def read(self, digest: bytes, parent: bytes, views: Sequence[memoryview]) -> ReadOutcome:
        """Read a page into memory, which has any contents if the outcome is not READ.

        `parent`: the digest of the page before it.
        """
        key = self._identity + digest
        try:
            descriptor = self._directory.open_page(key, parent)
        except OSError:
            return ReadOutcome.MISSING
        try:
            header = bytearray(_header_bytes(views))
            is_good = (
                os.fstat(descriptor).st_size == _file_bytes(views)
                and _read_all(descriptor, [memoryview(header), *views])
                and bytes(header) == self._header(digest, views)
            )
            if is_good:
                # So that the least recently used are deleted first.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        except OSError:
            return ReadOutcome.MISSING
        finally:
            os.close(descriptor)
        if is_good:
            return ReadOutcome.READ
        with contextlib.suppress(OSError):
            self._directory.delete_page(key, parent)
        return ReadOutcome.REFUSED

    def list_changes(self) -> tuple[set[bytes], set[bytes]]:
        """The digests of files that have come since the last time, and of those that have gone."""
        come, gone = self._directory.list_changes()
        return self._own_digests(come), self._own_digests(gone)

    def _own_digests(self, keys: set[bytes]) -> set[bytes]:
        return {key[IDENTITY_BYTES:] for key in keys if key.startswith(self._identity)}

    def _header(self, digest: bytes, views: Sequence[memoryview]) -> bytes:
        """The header of the file of a page with these contents."""
        checksums = struct.pack(f"<{len(views)}I", *map(zlib.crc32, views))
        return _HEADER.pack(_MAGIC, self._identity, digest) + checksums


def _header_bytes(views: Sequence[memoryview]) -> int:
    return _HEADER.size + 4 * len(views)


def _file_bytes(views: Sequence[memoryview]) -> int:
    return _header_bytes(views) + sum(view.nbytes for view in views)


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Raises OSError if not all was written: the disk is full then."""
    for first in range(0, len(views), _MOST_BUFFERS):
        part = views[first : first + _MOST_BUFFERS]
        if os.writev(descriptor, part) != sum(view.nbytes for view in part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_all(descriptor: int, views: Sequence[memoryview]) -> bool:
    """Whether the file had enough."""
    for first in range(0, len(views), _MOST_BUFFERS):
        part = views[first : first + _MOST_BUFFERS]
        if os.readv(descriptor, part) != sum(view.nbytes for view in part):
            return False
    return True
