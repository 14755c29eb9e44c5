"""Shards: fixed parts of all caches, each owned by one gateway process at a time (docs/scale.md)."""
