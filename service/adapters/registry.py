"""The LoRA adapters that callers can name, and their versions. No I/O.

An id names the last version that was loaded under it. A cache belongs to a version: it is computed with that
one until it is released, also if the id names another one by then, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from service.errors import AdapterLimit, AdapterNotFound


@dataclass(slots=True)
class AdapterVersion:
    """One version of an adapter. `adapters.json` has these fields."""

    # Grows with each version of any adapter. Never reused.
    number: int
    adapter_id: str
    # None: all tenants can use it. Empty: the anonymous tenant.
    tenant: str | None
    # In PEFT's layout.
    directory: str
    # What the files must have, if others can change the directory; see `identity` in store.py.
    identity: str = ""
    pinned: bool = False
    # The id names a later version, or none.
    retired: bool = False
    # Known since a worker has loaded it.
    rank: int = 0
    size_bytes: int = 0


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

    def restore(self, versions: Iterable[AdapterVersion], last_number: int) -> None:
        """Adds the versions of an earlier gateway."""
        for version in versions:
            self.add(version)
        self.last_number = max(self.last_number, last_number)

    def next_number(self, beside: int = 0) -> int:
        """A number for a new version, beside so many other new ones. Raises AdapterLimit."""
        if len(self._versions) + beside >= self._max_versions:
            raise AdapterLimit("versions of adapters", self._max_versions)
        self.last_number += 1
        return self.last_number

    def add(self, version: AdapterVersion) -> None:
        """Adds a version. Its id names it from now on, unless it is retired."""
        self._versions[version.number] = version
        self.last_number = max(self.last_number, version.number)
        if not version.retired:
            self.retire(version.tenant, version.adapter_id)
            self._current[version.tenant, version.adapter_id] = version

    def update(self, added: Iterable[AdapterVersion], retired: Iterable[AdapterVersion]) -> None:
        """Adds versions, and removes ids."""
        for version in retired:
            self.retire(version.tenant, version.adapter_id)
        for version in added:
            self.add(version)

    def retire(self, tenant: str | None, adapter_id: str) -> bool:
        """Removes an id. Its version stays as long as it is in use. False: there was none."""
        version = self._current.pop((tenant, adapter_id), None)
        if version is not None:
            version.retired = True
        return version is not None

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
        """What a tenant's callers can name, by id."""
        ids = {adapter_id for owner, adapter_id in self._current if owner in (None, tenant)}
        return [self.resolve(adapter_id, tenant) for adapter_id in sorted(ids)]

    def of(self, tenant: str | None, adapter_id: str) -> AdapterVersion | None:
        """The version that an owner's id names."""
        return self._current.get((tenant, adapter_id))

    def get(self, number: int) -> AdapterVersion | None:
        """The version of a number, if it is still known."""
        return self._versions.get(number)

    def snapshot(self) -> list[AdapterVersion]:
        """Copies of all versions."""
        return [dataclasses.replace(version) for version in self]
