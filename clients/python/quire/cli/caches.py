"""`quire caches`: lists and releases a server's caches."""

from __future__ import annotations

import argparse
import datetime as dt

from quire import Client
from quire.cli.connecting import CONTROL_TIMEOUT_S, connected
from quire.cli.terminal import CommandFailed, WrongUsage, escaped
from quire.v1 import executor_pb2, types_pb2

_ROW = "{:<27}  {:>9}  {:<12}  {}"


def list_caches(options: argparse.Namespace) -> int:
    """Prints a line for each cache. Returns the exit status."""
    print(_ROW.format("cache", "tokens", "worker", "expires"))
    with connected(options) as client:
        for cache in client.list_caches():
            print(_ROW.format(escaped(cache.cache_id), cache.seq_len, escaped(cache.worker_id), _end(cache)))
    return 0


def _end(cache: types_pb2.KvCacheHandle) -> str:
    if not cache.HasField("expire_time"):
        return "never"
    return cache.expire_time.ToDatetime(dt.UTC).isoformat(timespec="seconds")


def release_caches(options: argparse.Namespace) -> int:
    """Releases the caches that the options name. Raises CommandFailed if one of them is unknown."""
    with connected(options) as client:
        cache_ids = [cache.cache_id for cache in client.list_caches()] if options.all else options.cache_ids
        if options.all and cache_ids and not options.yes:
            raise WrongUsage(f"--all releases all of your caches ({len(cache_ids)}): add --yes")
        unknown = [cache_id for cache_id in cache_ids if not _release(client, cache_id)]
    print(f"released {len(cache_ids) - len(unknown)} of {len(cache_ids)} caches")
    if unknown and not options.all:  # with --all, some may have expired meanwhile
        raise CommandFailed(f"not known: {' '.join(unknown)}")
    return 0


def _release(client: Client, cache_id: str) -> bool:
    """Releases a cache. Returns whether it existed. Raises grpc.RpcError."""
    request = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
    answer = client.stub.ReleaseCache(request, timeout=CONTROL_TIMEOUT_S, metadata=client.metadata)
    return answer.released
