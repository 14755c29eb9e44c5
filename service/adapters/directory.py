"""The operator's directory of adapters (`--adapters`): each subdirectory is one, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from service.adapters.registry import Adapters, AdapterVersion
from service.adapters.store import identity
from service.errors import AdapterLimit, InvalidArgument
from service.logging import get_logger

_log = get_logger(__name__)
_MAX_ID_CHARS = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class AdapterDirectory:
    """Finds what has changed in the directory. Changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    def scan(self) -> dict[str, str] | None:
        """For each adapter's name its identity. None: the directory cannot be read. Blocks on the disk."""
        found = {}
        try:
            for entry in self._path.iterdir():
                try:
                    found[entry.name] = identity(entry)
                except OSError:
                    continue  # no adapter, or not complete yet
        except OSError as error:
            _log.warning("cannot read the directory of adapters", error=error.strerror)
            return None
        return found

    def changes(
        self, found: Mapping[str, str] | None, adapters: Adapters
    ) -> tuple[list[AdapterVersion], list[AdapterVersion]]:
        """Versions that are gone, and new ones, whose numbers are taken. `found`: from `scan`."""
        if found is None:
            return [], []
        mine = {v.adapter_id: v for v in adapters if v.identity and not v.retired}
        gone = [version for adapter_id, version in mine.items() if adapter_id not in found]
        new: list[AdapterVersion] = []
        for adapter_id, files in found.items():
            version = mine.get(adapter_id)
            is_other = version is None and adapters.of(None, adapter_id) is not None
            is_same = version is not None and version.identity == files
            if is_other or is_same or not _is_adapter_id(adapter_id):
                continue
            try:
                number = adapters.next_number(len(new))
            except AdapterLimit as error:
                _log.warning("not all adapters of the directory can be used", why=error.message)
                break
            new.append(AdapterVersion(number, adapter_id, None, str(self._path / adapter_id), files))
        return gone, new


def check_adapter_id(adapter_id: str) -> None:
    """Raises InvalidArgument."""
    if not _is_adapter_id(adapter_id):
        allowed = (
            f"must have 1 to {_MAX_ID_CHARS} letters, digits and characters of ._-/, a letter or digit first"
        )
        raise InvalidArgument("BAD_ADAPTER", "adapter_id", allowed)


def _is_adapter_id(text: str) -> bool:
    return len(text) <= _MAX_ID_CHARS and _ID.fullmatch(text) is not None
