"""Files that are reloaded when they change."""

from __future__ import annotations

import os
import time
from pathlib import Path

from service.auth.reloaded_file import ReloadedFile
from workers.models.files import file_version


def test_a_file_that_is_rewritten_in_place_with_its_time_set_back_is_read_again(tmp_path: Path) -> None:
    """As a token that is replaced by one of the same length. Before, the old one stayed valid."""
    path = tmp_path / "tokens"
    path.write_text("old")
    tokens = ReloadedFile("tokens", [path], path.read_text)
    status = path.stat()
    assert not tokens.refresh()
    while path.stat().st_ctime_ns == status.st_ctime_ns:
        # The clock of the file system has moved on.
        time.sleep(0.001)
        with path.open("r+") as file:
            file.write("new")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) == (
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )
    assert tokens.refresh() and tokens.value == "new"
    assert file_version(path.stat()) != file_version(status), "nor is a model loaded that changes meanwhile"
