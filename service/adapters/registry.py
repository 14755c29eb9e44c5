"""The LoRA adapters that callers can name, and their versions. No I/O.

An id names the last version that was loaded under it. A cache belongs to a version: it is computed with that
one until it is released, also if the id names another one by then, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from service.errors import AdapterLimit, AdapterNotFound, InvalidArgument

_MAX_ID_CHARS = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(slots=True)
class AdapterVersion:
    """One version of an adapter. What is stored has these fields."""

    # Grows with each version of any adapter. Never reused.
    number: int
    adapter_id: str
    # None: all tenants can use it. Empty: the anonymous tenant.
    tenant: str | None
    # In PEFT's layout.
    directory: str
    # When it was found: of the files, if others can change the directory; see `identity` in store.py.
    identity: str = ""
    pinned: bool = False
    # The id names a later version, or none.
    retired: bool = False
    # Known since a worker has loaded it.
    rank: int = 0
    size_bytes: int = 0
    # See `content_digest` in workers/common/adapter_files.py. Empty: the files are gone.
    digest: str = ""


class Adapters:
    """Owner of all versions that are in use."""

    def __init__(self, max_versions: int) -> None:
        self._max_versions = max_versions
        self._versions: dict[int, AdapterVersion] = {}
        # By owner and id: what callers get.
        self._current: dict[tuple[str | None, str], AdapterVersion] = {}
        self.last_number = 0

    def __iter__(self) -> Iterator[AdapterVersion]:
        return iter(self._versions.values())

    def next_number(self, reserved: int = 0) -> int:
        """A number for a new version. `reserved`: versions that have numbers, and are added with it.

        Raises AdapterLimit.
        """
        if len(self._versions) + reserved >= self._max_versions:
            raise AdapterLimit("versions of adapters", self._max_versions)
        self.last_number += 1
        return self.last_number

    def update(
        self, added: Iterable[AdapterVersion], retired: Iterable[AdapterVersion] = ()
    ) -> list[AdapterVersion]:
        """Removes the ids of versions, which stay as long as they are in use, and adds others.

        The id of each names it from now on, unless it is retired already. Returns all that have changed.
        """
        changed: list[AdapterVersion] = []
        for version in retired:
            changed += self._retire(version)
        for version in added:
            self._versions[version.number] = version
            self.last_number = max(self.last_number, version.number)
            if not version.retired:
                changed += self._retire(version)
                self._current[version.tenant, version.adapter_id] = version
            changed.append(version)
        return changed

    def _retire(self, version: AdapterVersion) -> list[AdapterVersion]:
        """Removes the id that a version has. Returns what it named, if anything."""
        named = self._current.pop((version.tenant, version.adapter_id), None)
        if named is None:
            return []
        named.retired = True
        return [named]

    def remove_unused(self, in_use: Collection[int]) -> list[AdapterVersion]:
        """Removes and returns the versions that no id names and no cache belongs to."""
        unused = [v for v in self._versions.values() if v.retired and v.number not in in_use]
        for version in unused:
            del self._versions[version.number]
        return unused

    def resolve(self, adapter_id: str, tenant: str) -> AdapterVersion:
        """The version that a tenant's caller gets. Raises AdapterNotFound."""
        version = self._current.get((tenant, adapter_id)) or self._current.get((None, adapter_id))
        if version is None:
            raise AdapterNotFound(adapter_id)
        return version

    def visible_to(self, tenant: str) -> list[AdapterVersion]:
        """The adapters that a tenant's callers can use, by id."""
        ids = {adapter_id for owner, adapter_id in self._current if owner in (None, tenant)}
        return [self.resolve(adapter_id, tenant) for adapter_id in sorted(ids)]

    def of(self, tenant: str | None, adapter_id: str) -> AdapterVersion | None:
        return self._current.get((tenant, adapter_id))

    def get(self, number: int) -> AdapterVersion | None:
        return self._versions.get(number)

    def digest_of(self, number: int) -> int | str:
        """The digest of a version's content; its number if that is not known."""
        version = self._versions.get(number)
        return number if version is None else version.digest or number


def check_adapter_id(adapter_id: str) -> None:
    """Raises InvalidArgument."""
    if len(adapter_id) > _MAX_ID_CHARS or _ID.fullmatch(adapter_id) is None:
        allowed = (
            f"must have 1 to {_MAX_ID_CHARS} letters, digits and characters of ._-/, a letter or digit first"
        )
        raise InvalidArgument("BAD_ADAPTER", "adapter_id", allowed)
