"""Adapters that are replaced and unloaded while callers use them, and through faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from quire.v1 import admin_pb2, admin_pb2_grpc

from tests.soak.tally import Tally

# The ids that callers use.
IDS = ("x", "y", "z")
_TIMEOUT_S = 30.0
_RETRY_S = 0.05


class Adapters:
    """Loads one of some directories under one of the ids, again and again. Knows what each version is."""

    def __init__(
        self, channel: grpc.aio.Channel, directories: Sequence[Path], tally: Tally, seed: int
    ) -> None:
        # Those that callers use.
        self.ids: Sequence[str] = IDS if directories else ()
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self._directories = {directory.name: directory for directory in directories}
        self._tally = tally
        self._rng = random.Random(seed)
        self._names = {0: ""}

    @property
    def names(self) -> list[str]:
        """Of the directories."""
        return list(self._directories)

    async def load(self, adapter_id: str, name: str) -> None:
        """Loads a directory, and notes its version, also if the answer is lost."""
        request = admin_pb2.LoadAdapterRequest(adapter_id=adapter_id, source=str(self._directories[name]))
        before = await self._version_of(adapter_id)
        try:
            answer = await self._admin.LoadAdapter(iter([request]), timeout=_TIMEOUT_S)
            self._names[answer.adapter.version] = name
        except grpc.RpcError:
            version = await self._version_of(adapter_id)
            if version != before:
                self._names[version] = name

    async def of_version(self, version: int) -> str:
        """The directory of a version, which callers may know before its load was answered."""
        async with asyncio.timeout(4 * _TIMEOUT_S):
            while version not in self._names:
                await asyncio.sleep(_RETRY_S)
        return self._names[version]

    async def run(self, stop: asyncio.Event) -> None:
        """Replaces and unloads, until told to stop."""
        while self.ids and not stop.is_set():
            adapter_id = self._rng.choice(self.ids)
            if self._rng.random() < 0.2:
                request = admin_pb2.UnloadAdapterRequest(adapter_id=adapter_id)
                try:
                    await self._admin.UnloadAdapter(request, timeout=_TIMEOUT_S)
                except grpc.RpcError:
                    continue
            await self.load(adapter_id, self._rng.choice(self.names))
            self._tally.replaced_adapters += 1
            await asyncio.sleep(self._rng.uniform(0.0, 0.4))

    async def _version_of(self, adapter_id: str) -> int:
        """The version that an id names. 0: none."""
        while True:
            try:
                listed = await self._admin.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=_TIMEOUT_S)
            except grpc.RpcError:
                await asyncio.sleep(_RETRY_S)
                continue
            versions: dict[str, int] = {one.adapter_id: one.version for one in listed.adapters}
            return versions.get(adapter_id, 0)
