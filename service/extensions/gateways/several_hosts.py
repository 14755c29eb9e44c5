"""Gateways on several hosts: a database has the leases of the shards, and their journals."""

from __future__ import annotations

from pathlib import Path

import grpc

from service.admin import Stop
from service.config import Config
from service.extension import ServedShard
from service.extensions.gateways.keeper import Keeper
from service.extensions.gateways.member import FurtherShard, Member
from service.extensions.gateways.peers import Peers
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.journal import PostgresJournal
from service.extensions.gateways.postgres.leases import Lease, Leases
from service.journal.base import Journal, JournalUnusable
from service.journal.recovery import Apply
from service.pool import pool_files
from service.shard import OpenJournal, OpenShard, Shard, open_shard


class SeveralHosts(Member):
    """See `Member`. `Keeper` decides which shards this gateway has."""

    def __init__(self, config: Config, listen: str, advertise: str, shards: int) -> None:
        """Raises ConfigError."""
        self._pool = pool = Path(config.pool)
        self._keeper = Keeper(config, f"{listen} {advertise}".strip(), shards)
        # All gateways have the same certificate.
        credentials = pool_files.channel_credentials(pool)
        peers = Peers(config, pool_files.secret(pool), self._keeper.addresses, credentials)
        super().__init__(config, listen, peers)

    async def _open_home(self, _open_journal: OpenJournal) -> OpenShard:
        """Waits for a home shard, and opens it."""
        try:
            return await self._keeper.join(self._open)
        except DatabaseFailed as error:
            raise JournalUnusable(f"the database of the journal: {error}") from None

    async def _open(self, shard: Shard, lease: Lease, leases: Leases) -> OpenShard:
        """Opens a shard. Raises JournalUnusable or DatabaseFailed."""

        async def open_journal(config: Config, _directory: Path | None, apply: Apply) -> Journal:
            journal = PostgresJournal(Database(config.journal), leases, lease)
            await journal.recover(apply)
            return journal

        return await open_shard(self._config, open_journal, None, shard, lease)

    def _add_port(self, server: grpc.aio.Server) -> int:
        """Binds a port that requires a certificate of the pool."""
        return server.add_secure_port(self.listen, pool_files.server_credentials(self._pool))

    async def _keep_shards(self, _stop: Stop) -> None:
        """Runs the cores of further shards."""

        async def open_one(shard: Shard, lease: Lease, leases: Leases) -> FurtherShard:
            return self._open_core(await self._open(shard, lease, leases))

        await self._keeper.run(open_one)

    async def _give_back(self, home: ServedShard) -> None:
        """Gives the shards back. The workers wait for their next owners."""
        home.pool.detach_workers()
        await self._keeper.drain()
