"""Loads, replaces and removes adapters, and tells workers which there are.

A version is copied, and tried on a worker, before its id names it. A failure or cancellation before that
leaves nothing behind. Workers load an adapter when a forward first needs it. In the operator's directory
(`--adapters`) each subdirectory is an adapter, by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from quire.v1 import admin_pb2

from service.adapters import store as files
from service.adapters.registry import Adapters, AdapterVersion, check_adapter_id
from service.adapters.store import AdapterStore, ScannedAdapter, bad_adapter
from service.caches.machine import CacheMachine
from service.completion import complete
from service.config import Config
from service.errors import AdapterLimit, InvalidArgument, NoWorker, StorageUnavailable
from service.logging import get_logger
from service.pool.supervisor import Supervisor
from service.uploads import Arriving, UploadedFile
from workers.common import worker_pb2
from workers.common.adapter_files import FILES, content_digest

_log = get_logger(__name__)
# How often versions that nobody uses are looked for, and the operator's directory is read.
_INTERVAL_S = 5.0
# How long a version is kept that no id names, if no cache has it.
_RETIRED_S = 30.0
# Loads at a time, of a tenant and of all. Each may hold a copy on the disk.
_MOST_LOADS, _MOST_LOADS_OF_ALL = 4, 16


class AdapterLoader:
    """Owner of the running loads. Changes the registry, the files, and what workers know."""

    def __init__(
        self,
        adapters: Adapters,
        store: AdapterStore,
        pool: Supervisor,
        caches: CacheMachine,
        config: Config,
    ) -> None:
        self._adapters = adapters
        self._store = store
        self._pool = pool
        self._caches = caches
        self._config = config
        self._directory = Path(config.adapters).resolve() if config.adapters else None
        # Running ones, by tenant.
        self._loads: Counter[str] = Counter()
        # Since when each retired version is known to be so, by number.
        self._retired_s: dict[int, float] = {}
        # Changes are stored one after the other.
        self._writing = asyncio.Lock()
        # What the directory had when it was read last: adapters, and subdirectories that are none.
        self._found: Mapping[str, ScannedAdapter] = {}
        self._ignored: set[str] = set()
        self._contents = caches.adapter_contents()
        store.recover(adapters, self._contents, caches.adapters_in_use())
        if self._directory is not None:
            self._found = {v.adapter_id: ScannedAdapter(v.identity, v.digest) for v in self._of_directory()}
            scanned = files.scan(self._directory, self._found, config.max_lora_bytes)
            self._use(*self._directory_changes(self._directory, scanned))
        store.store_at_start(adapters)
        pool.adapter_command = self._all_adapters

    # LoadAdapter.

    async def load(
        self, requests: AsyncIterator[admin_pb2.LoadAdapterRequest], tenant: str
    ) -> AdapterVersion:
        """See AdminService.LoadAdapter. Raises QuireError, without any change."""
        if self._loads[tenant] >= _MOST_LOADS:
            raise AdapterLimit("adapters of this tenant being loaded", _MOST_LOADS)
        if self._loads.total() >= _MOST_LOADS_OF_ALL:
            raise AdapterLimit("adapters being loaded", _MOST_LOADS_OF_ALL)
        self._loads[tenant] += 1
        arriving = Arriving(requests, self._config.message_timeout_s)
        number = 0
        try:
            first = await arriving.next()
            if first is None:
                raise InvalidArgument(
                    "BAD_ADAPTER", "adapter_id", "the first message must have an adapter_id"
                )
            check_adapter_id(first.adapter_id)
            await self._remove_unused()
            number = self._adapters.next_number()
            await self._copy(first, arriving, number)
            await complete(asyncio.to_thread(self._store.directory.sync, str(number)))
            digest = await complete(asyncio.to_thread(content_digest, self._store.path(number)))
            version = AdapterVersion(
                number,
                first.adapter_id,
                None if first.shared else tenant,
                str(self._store.path(number)),
                pinned=first.pinned,
                digest=digest,
            )
            await self._try(version)
            await complete(self._add(version))
        except BaseException as error:
            if number and self._adapters.get(number) is None:
                self._pool.send_adapters(worker_pb2.AdapterCommand(removed=[number]))
                await asyncio.shield(asyncio.to_thread(self._store.discard, number))
            if isinstance(error, OSError):
                raise StorageUnavailable(error.strerror) from None
            raise
        finally:
            self._loads -= Counter((tenant,))
        _log.info("adapter loaded", adapter=version.adapter_id, version=number, rank=version.rank)
        return version

    async def _copy(
        self,
        first: admin_pb2.LoadAdapterRequest,
        arriving: Arriving[admin_pb2.LoadAdapterRequest],
        number: int,
    ) -> None:
        if not first.source:
            await self._receive(first, arriving, number)
            return
        if first.HasField("file"):
            raise InvalidArgument("BAD_ADAPTER", "file", "must be unset if there is a source")
        path = Path(first.source)
        if not path.is_absolute():
            raise InvalidArgument("BAD_SOURCE", "source", "must be an absolute path of the server's machine")
        # Complete even if cancelled: a failed copy must not be removed while the thread still writes it.
        await complete(asyncio.to_thread(self._store.copy, path, number))

    async def _receive(
        self,
        request: admin_pb2.LoadAdapterRequest | None,
        arriving: Arriving[admin_pb2.LoadAdapterRequest],
        number: int,
    ) -> None:
        """Writes the parts of both files. `request`: the first message."""
        received: dict[str, UploadedFile] = {}
        with contextlib.ExitStack() as stack:
            name: str | None = None
            while request is not None:
                part = request.file
                if part.name != name and request.HasField("file"):
                    name = part.name
                    if name not in FILES or name in received:
                        allowed = f"must be {' or '.join(FILES)}, the parts of a file one after the other"
                        raise InvalidArgument("BAD_ADAPTER", "file.name", allowed)
                    opened = await complete(asyncio.to_thread(self._store.open, number, name))
                    received[name] = stack.enter_context(opened)
                if part.data:
                    await asyncio.to_thread(received[part.name].write, part.data)
                request = await arriving.next()
            missing = [name for name in FILES if name not in received]
            if missing:
                raise InvalidArgument("BAD_ADAPTER", "file", f"{missing[0]} is missing")

    async def _try(self, version: AdapterVersion) -> None:
        """Loads a version on one worker. Raises InvalidArgument, NoWorker or AdapterLimit."""
        try:
            async with asyncio.timeout(self._config.worker_start_timeout_s):
                event = await self._pool.load_adapter(_source(version))
        except TimeoutError:
            raise NoWorker from None
        if event.WhichOneof("event") == "error":
            if event.error.reason != worker_pb2.WORKER_ERROR_REASON_ADAPTER:
                raise bad_adapter("the worker could not load it")
            raise bad_adapter(event.error.detail)
        version.rank, version.size_bytes = event.adapter_loaded.rank, event.adapter_loaded.size_bytes

    async def _add(self, version: AdapterVersion) -> None:
        """Makes the id name the version."""
        async with self._writing:
            await self._change([version])

    # UnloadAdapter.

    async def unload(self, adapter_id: str, tenant: str | None) -> bool:
        """Removes an id. False: there was none. Raises StorageUnavailable."""
        check_adapter_id(adapter_id)
        async with self._writing:
            version = self._adapters.of(tenant, adapter_id)
            if version is None:
                return False
            if version.identity:
                where = "it is in the server's directory of adapters: remove it there"
                raise InvalidArgument("BAD_ADAPTER", "adapter_id", where)
            await complete(self._change((), [version]))
        _log.info("adapter unloaded", adapter=adapter_id, version=version.number)
        return True

    async def run(self) -> None:
        """Removes versions that nobody uses, and finds new ones in the directory, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self._remove_unused()
            if self._directory is None:
                continue
            max_bytes = self._config.max_lora_bytes
            scanned = await asyncio.to_thread(files.scan, self._directory, self._found, max_bytes)
            async with self._writing:
                new, gone = self._directory_changes(self._directory, scanned)
                # If that cannot be stored, the next round tries again.
                if gone or new:
                    with contextlib.suppress(StorageUnavailable):
                        await self._change(new, gone)

    def _of_directory(self) -> list[AdapterVersion]:
        """The versions that the directory has, as far as the registry knows."""
        return [version for version in self._adapters if version.identity and not version.retired]

    def _directory_changes(
        self, directory: Path, scanned: tuple[dict[str, ScannedAdapter], dict[str, str]] | None
    ) -> tuple[list[AdapterVersion], list[AdapterVersion]]:
        """New versions, whose numbers are taken, and those that are gone. `scanned`: see `store.scan`."""
        if scanned is None:
            return [], []
        self._found, reasons = scanned
        # Once for each: one may be being copied.
        for name in sorted(reasons.keys() - self._ignored):
            _log.warning("a subdirectory of adapters is ignored", name=name, why=reasons[name])
        self._ignored = set(reasons)
        gone = [version for version in self._of_directory() if version.adapter_id not in self._found]
        new: list[AdapterVersion] = []
        taken: set[int] = set()
        for adapter_id, (identity, digest) in self._found.items():
            version = self._adapters.of(None, adapter_id)
            # One that was loaded by a call keeps its id.
            if version is not None and not version.identity:
                continue
            if version is not None and version.digest == digest:
                version.identity = identity
                continue
            path = str(directory / adapter_id)
            # Numbers that caches have of this content, and the registry has not.
            known = sorted(n for n, content in self._contents.items() if content == digest)
            again = [n for n in known if n not in taken and self._adapters.get(n) is None]
            try:
                number = again.pop() if again else self._adapters.next_number(len(new))
            except AdapterLimit as error:
                _log.warning("not all adapters of the directory can be used", why=error.message)
                break
            new.append(AdapterVersion(number, adapter_id, None, path, identity, digest=digest))
            # Further numbers that earlier owners of the caches gave the same content.
            new += (
                AdapterVersion(n, adapter_id, None, path, identity, retired=True, digest=digest)
                for n in again
            )
            taken.update((number, *again))
        return new, gone

    # Versions are stored before workers know of a version: caches, and KV that workers keep for the next
    # gateway, are of its number.

    async def _change(self, added: Sequence[AdapterVersion], retired: Sequence[AdapterVersion] = ()) -> None:
        """See `Adapters.update`. Stores them first. Needs `_writing`. Raises StorageUnavailable."""
        listed = copy.deepcopy(self._adapters)
        listed.update(added, retired)
        await self._store.store(listed)
        self._use(added, retired)

    def _use(self, added: Sequence[AdapterVersion], retired: Sequence[AdapterVersion] = ()) -> None:
        changed = self._adapters.update(added, retired)
        if changed:
            self._pool.send_adapters(worker_pb2.AdapterCommand(added=map(_source, changed)))

    # What nobody uses.

    async def _remove_unused(self) -> None:
        """Removes versions that no id names and no cache has, some time after they were retired.

        Until then a request that has found one may still make a cache of it.
        """
        now_s = time.monotonic()
        retired = {version.number for version in self._adapters if version.retired}
        self._retired_s = {number: self._retired_s.get(number, now_s) for number in retired}
        recent = {number for number, since_s in self._retired_s.items() if now_s - since_s < _RETIRED_S}
        if retired == recent:
            return
        removed = self._adapters.remove_unused(self._caches.adapters_in_use().keys() | recent)
        if removed:
            self._pool.send_adapters(worker_pb2.AdapterCommand(removed=[v.number for v in removed]))
            for version in removed:
                await asyncio.to_thread(self._store.remove, version)

    def _all_adapters(self) -> worker_pb2.AdapterCommand:
        """The command that a worker gets when it is ready."""
        return worker_pb2.AdapterCommand(added=map(_source, self._adapters), all=True)


def _source(version: AdapterVersion) -> worker_pb2.AdapterSource:
    return worker_pb2.AdapterSource(
        adapter=version.number,
        directory=version.directory,
        digest=version.digest,
        # No call can unpin a version that no id names.
        pinned=version.pinned and not version.retired,
    )
