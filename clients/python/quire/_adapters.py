"""The requests of one LoadAdapter, with its files in parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from quire._uploads import Content, parts_of
from quire.v1 import admin_pb2

# A directory of this machine, or the contents of the files by their names.
AdapterFiles: TypeAlias = str | os.PathLike[str] | Mapping[str, bytes]

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_requests(
    settings: admin_pb2.LoadAdapterRequest, files: AdapterFiles | None, max_request_bytes: int
) -> Iterator[admin_pb2.LoadAdapterRequest]:
    """Raises ValueError unless there is either a source or files, and OSError for unreadable files."""
    if bool(settings.source) == (files is not None):
        raise ValueError("an adapter has either a source or files")
    contents: Mapping[str, Content] = {}
    if isinstance(files, Mapping):
        contents = files
    elif files is not None:
        paths = {name: Path(files, name) for name in _FILES}
        for path in paths.values():
            path.open("rb").close()
        contents = paths

    def requests() -> Iterator[admin_pb2.LoadAdapterRequest]:
        yield settings
        for name, content in contents.items():
            for part in parts_of(content, max_request_bytes):
                yield admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(name=name, data=part))

    return requests()
