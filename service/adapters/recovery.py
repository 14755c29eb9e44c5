"""Which adapters there are when a gateway starts: those that are stored, as far as caches agree with them.

A cache names its adapter by number, and its salt has the digest of the adapter's content (`Tenant.salt`). So
a stored number that caches know with other content is not used for them, and one that is not stored is found
again by the content: in the operator's directory, or among the copies. With several hosts none is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from service.adapters.registry import Adapters, AdapterVersion
from service.adapters.store import AdapterStore
from service.logging import get_logger

_log = get_logger(__name__)


def recover(
    adapters: Adapters, store: AdapterStore, contents: Mapping[int, str], in_use: Collection[int]
) -> None:
    """Adds the versions of an earlier gateway. Blocks; raises nothing.

    contents: digests of adapters of caches, by number. in_use: the numbers of all adapters of caches.
    """
    versions, last_number = store.stored()
    adapters.last_number = max([last_number, store.last_copy(), *contents, *in_use])
    for version in versions:
        version.digest = version.digest or store.digest_of(version)
        if version.number in contents and contents[version.number] != version.digest:
            number = version.number
            version.number = adapters.last_number = adapters.last_number + 1
            _log.warning(
                "an adapter gets another number: caches have other content under its own",
                adapter=version.adapter_id,
                version=version.number,
                before=number,
            )
    adapters.update(versions)
    copies = _copies_of_caches(adapters, store, contents) if store.is_persistent else []
    adapters.update(copies)
    store.keep_copies(adapters)


def _copies_of_caches(
    adapters: Adapters, store: AdapterStore, contents: Mapping[int, str]
) -> list[AdapterVersion]:
    """Versions that only caches know, and of which there are copies. No id names them."""
    found = []
    for number, digest in contents.items():
        if adapters.get(number) is None:
            version = AdapterVersion(number, "", None, str(store.path(number)), retired=True, digest=digest)
            if store.digest_of(version) == digest:
                found.append(version)
    return found
