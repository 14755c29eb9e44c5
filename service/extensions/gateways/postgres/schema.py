"""The tables, in the schema `quire`.

`version` has the version of the tables. `shards` has a row for each shard: its owner, and values that only
the owner may change. `log` has the frames of the shards' journals, made by `service/journal/encoding.py`.
"""

from __future__ import annotations

from typing import Any, Final

from service.extensions.gateways.postgres.errors import DatabaseUnusable

# 1 and 2 were used before the first release.
VERSION: Final = 3
_TABLES: Final = """
    CREATE SCHEMA IF NOT EXISTS quire;
    CREATE TABLE quire.version (version integer NOT NULL);
    CREATE TABLE quire.shards (
        shard integer PRIMARY KEY,
        lease_id text NOT NULL,
        fence bigint NOT NULL DEFAULT 0,
        owner text NOT NULL DEFAULT '',
        address text NOT NULL DEFAULT '',
        expires_at timestamptz,
        -- The process of the server that has the connection of the last renewal. NULL: it is gone.
        session integer,
        first_seq bigint NOT NULL DEFAULT 1
    );
    CREATE TABLE quire.log (
        shard integer NOT NULL REFERENCES quire.shards,
        seq bigint NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (shard, seq)
    );
    -- Tokens hardly compress, and the time would be part of each commit.
    ALTER TABLE quire.log ALTER COLUMN data SET STORAGE EXTERNAL;
    -- Its row is locked with each commit and renewed every few seconds.
    ALTER TABLE quire.shards SET (fillfactor = 10, autovacuum_vacuum_threshold = 500);
"""
# Advisory lock of programs that create the tables at the same time: "Quire".
_LOCK: Final = 0x5175697265


async def create_tables(connection: Any) -> None:
    """Creates the tables if they are missing. Raises DatabaseUnusable, and exceptions of the driver."""
    if await _version(connection) == VERSION:
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        # Another program may have created them meanwhile.
        version = await _version(connection)
        if version == 0:
            await connection.execute(_TABLES)
            await connection.execute("INSERT INTO quire.version VALUES ($1)", VERSION)
        elif version != VERSION:
            raise DatabaseUnusable(
                f"its tables have version {version}, and this version of Quire knows {VERSION} only: use the"
                " version that wrote them, or another database; or, to begin without caches, drop the"
                " schema quire"
            )


async def _version(connection: Any) -> int:
    # Not `to_regclass`, whose answer may be older than the lock.
    exists = "SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = 'quire' AND tablename = 'version'"
    if not await connection.fetchval(exists):
        return 0
    # A backup may have restored the table without its row: then the version is unknown.
    return int(await connection.fetchval("SELECT coalesce(max(version), -1) FROM quire.version"))
