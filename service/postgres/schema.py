"""The tables, in a schema `quire` of their own, and how those of earlier versions are brought up to date.

`version` says how many migrations have run. `shards` has a row for each shard: its owner, and what only the
owner may change. `log` has a row for each group of commits, as `service/journal/encoding.py` seals it.
"""

from __future__ import annotations

from typing import Any, Final

from service.postgres.errors import DatabaseUnusable

# Never changed once released. A new one is appended.
MIGRATIONS: Final = (
    """
    CREATE TABLE quire.shards (
        shard integer PRIMARY KEY,
        lease_id text NOT NULL,
        fence bigint NOT NULL DEFAULT 0,
        writer bigint NOT NULL DEFAULT 0,
        owner text NOT NULL DEFAULT '',
        address text NOT NULL DEFAULT '',
        expires_at timestamptz,
        first_seq bigint NOT NULL DEFAULT 1,
        model text
    );
    CREATE TABLE quire.log (
        shard integer NOT NULL REFERENCES quire.shards,
        seq bigint NOT NULL,
        wall_ns bigint NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (shard, seq)
    );
    -- Tokens hardly compress, and the time would be part of each commit.
    ALTER TABLE quire.log ALTER COLUMN data SET STORAGE EXTERNAL;
    -- Its row is locked with each commit and renewed every few seconds.
    ALTER TABLE quire.shards SET (fillfactor = 10, autovacuum_vacuum_threshold = 500);
    """,
    # The process of the server that has the connection of the last renewal. NULL: it is gone.
    "ALTER TABLE quire.shards ADD COLUMN session integer",
)
# Of programs that migrate at the same time. "Quire".
_LOCK: Final = 0x5175697265


async def upgrade(connection: Any) -> None:
    """Runs the migrations that are missing. Raises DatabaseUnusable, and what the driver raises."""
    if await _version(connection) == len(MIGRATIONS):
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        # Another one may have been first.
        version = await _version(connection)
        if version > len(MIGRATIONS):
            raise DatabaseUnusable(
                f"its tables have version {version}, and this version of Quire knows {len(MIGRATIONS)} at"
                " most: use the version that wrote them, or a newer one; or another database"
            )
        if version == 0:
            await connection.execute("CREATE SCHEMA IF NOT EXISTS quire")
            await connection.execute("CREATE TABLE quire.version (version integer NOT NULL)")
            await connection.execute("INSERT INTO quire.version VALUES (0)")
        for migration in MIGRATIONS[version:]:
            await connection.execute(migration)
        await connection.execute("UPDATE quire.version SET version = $1", len(MIGRATIONS))


async def _version(connection: Any) -> int:
    # Not `to_regclass`, whose answer may be older than the lock.
    exists = "SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = 'quire' AND tablename = 'version'"
    if not await connection.fetchval(exists):
        return 0
    return int(await connection.fetchval("SELECT version FROM quire.version"))
