"""Shards in a PostgreSQL database: their owners and their journals."""
