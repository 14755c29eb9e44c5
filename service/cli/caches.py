"""`quire caches`: lists a server's caches, and releases them."""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Iterator

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc, types_pb2

from service.cli.channel import CONTROL_TIMEOUT_S, connected, print_error
from service.printable import escaped

_PAGE_SIZE = 1000
_ROW = "{:<27}  {:>9}  {:<12}  {}"


def list_caches(options: argparse.Namespace) -> int:
    """Prints a line for each cache. Returns the exit status."""
    with connected(options) as channel:
        try:
            print(_ROW.format("cache", "tokens", "worker", "expires"))
            for cache in _caches(executor_pb2_grpc.ModelExecutorServiceStub(channel)):
                print(
                    _ROW.format(escaped(cache.cache_id), cache.seq_len, escaped(cache.worker_id), _end(cache))
                )
        except grpc.RpcError as error:
            print_error(error)
            return 1
    return 0


def _end(cache: types_pb2.KvCacheHandle) -> str:
    if not cache.HasField("expire_time"):
        return "never"
    return cache.expire_time.ToDatetime(dt.UTC).isoformat(timespec="seconds")


def release_caches(options: argparse.Namespace) -> int:
    """Releases the caches that the options name. Returns the exit status: 1 if one of them is not known."""
    with connected(options) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        try:
            cache_ids = [cache.cache_id for cache in _caches(stub)] if options.all else options.cache_ids
            if options.all and cache_ids and not options.yes:
                print(f"quire: --all would release {len(cache_ids)} caches: say --yes, too", file=sys.stderr)
                return 2
            unknown = [cache_id for cache_id in cache_ids if not _release(stub, cache_id)]
        except grpc.RpcError as error:
            print_error(error)
            return 1
    print(f"released {len(cache_ids) - len(unknown)} of {len(cache_ids)} caches")
    if unknown and not options.all:  # of all, some may have expired meanwhile
        print(f"quire: not known: {' '.join(map(escaped, unknown))}", file=sys.stderr)
        return 1
    return 0


def _caches(stub: executor_pb2_grpc.ModelExecutorServiceStub) -> Iterator[types_pb2.KvCacheHandle]:
    """All caches, page by page. Raises grpc.RpcError."""
    request = executor_pb2.ListCachesRequest(page_size=_PAGE_SIZE)
    while True:
        page = stub.ListCaches(request, timeout=CONTROL_TIMEOUT_S)
        yield from page.kv_caches
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _release(stub: executor_pb2_grpc.ModelExecutorServiceStub, cache_id: str) -> bool:
    """Whether the cache was known. Raises grpc.RpcError."""
    request = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
    return stub.ReleaseCache(request, timeout=CONTROL_TIMEOUT_S).released
