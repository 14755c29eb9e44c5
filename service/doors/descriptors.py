"""Descriptors for as many connections as are allowed, with some left for workers and files."""

from __future__ import annotations

import dataclasses
import resource

from service.config import Config
from service.logging import get_logger

_log = get_logger(__name__)
# Beside connections: the gateway's own; and a worker's, with those of one that replaces it.
_OWN = 128
_PER_WORKER = 16
# With so many nobody can connect, or no worker starts.
_TOO_FEW = 32


class TooFewDescriptors(Exception):
    """A gateway cannot run with so few. The message is for the operator."""


def with_descriptors(config: Config) -> Config:
    """The settings with as many connections as there are descriptors for. Raises the process's soft limit.

    More connections can be open for a moment than are allowed, until the newest are hung up on: there is room
    for twice as many, where the hard limit has it.

    Raises:
        TooFewDescriptors: There are not even those of the gateway itself.
    """
    reserved = _OWN + _PER_WORKER * config.workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reserved + 2 * config.max_connections
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    limit = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit <= _TOO_FEW:
        raise TooFewDescriptors(
            f"{limit} descriptors are too few to serve (ulimit -n); for all connections it takes {wanted}"
        )
    possible = max(1, limit - reserved)
    if possible >= config.max_connections:
        return config
    _log.warning(
        "fewer connections are allowed than max_connections: too few descriptors (ulimit -n)",
        max_connections=possible,
        descriptors=limit,
    )
    return dataclasses.replace(config, max_connections=possible)
