"""The runtimes beside the server's own, from their file: read at the start, and when an operator asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from service.errors import BadRuntimes, RuntimeNotFound
from service.logging import get_logger
from service.runtimes.base import Runtime
from service.runtimes.config_file import Runtimes, load
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.runtime import RemoteRuntime
from service.runtimes.remote.spending import Spending
from service.runtimes.router import Router

_log = get_logger(__name__)


class RuntimesFile:
    """Owner of the providers, among which `router` chooses."""

    def __init__(self, path: Path | None, local: Runtime, spending: Spending) -> None:
        """Without a path there are none. Raises BadRuntimes."""
        self._path = path
        self._spending = spending
        self._reading = asyncio.Lock()
        configured = Runtimes() if path is None else load(path)
        self._providers: list[RemoteRuntime] = []
        self._providers = self._with(configured.providers)
        self.router = Router([local, *self._providers], configured.routing)

    async def read_again(self, renewed: str = "") -> int:
        """Serves what the file says now. Returns how many providers were made anew.

        These are the ones whose settings have changed, and `renewed`. What was begun with those before is
        finished with them. Raises BadRuntimes or RuntimeNotFound: nothing has changed.
        """
        if self._path is None:
            raise BadRuntimes("the server was started without one")
        async with self._reading:
            configured = await asyncio.to_thread(load, self._path)
            local = self.router.runtimes[0]
            if renewed not in ("", local.name, *(config.name for config in configured.providers)):
                raise RuntimeNotFound
            before, self._providers = self._providers, self._with(configured.providers, renewed)
            self.router.replace([local, *self._providers], configured.routing)
            gone = [provider.close() for provider in before if provider not in self._providers]
            # To its end, also if nobody waits for it any more.
            await asyncio.shield(asyncio.gather(*gone))
        made = [provider.name for provider in self._providers if provider not in before]
        _log.info("the file of runtimes was read again", providers=len(self._providers), made_anew=made)
        return len(made)

    def _with(self, configs: Sequence[ProviderConfig], renewed: str = "") -> list[RemoteRuntime]:
        """A provider for each, as far as possible those there are."""
        same = {provider.name: provider for provider in self._providers if provider.name != renewed}
        return [
            known
            if (known := same.get(config.name)) is not None and known.config == config
            else RemoteRuntime(config, spending=self._spending)
            for config in configs
        ]
