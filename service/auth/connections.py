"""Connections to the gRPC port: their limits and timeouts."""

from __future__ import annotations

import dataclasses
import resource

from service.config import Config
from service.handshakes import HandshakeLimits
from service.logging import get_logger
from service.setting_rules import MAX_WORKERS

_log = get_logger(__name__)
# Concurrent calls per connection. Further ones wait in the client.
_MAX_STREAMS = 4096
# Calls that the event loop has not accepted yet. Above the first limit gRPC cancels some new calls, above the
# second all, without a reason. So these limits are for floods that cannot be answered one by one.
_MAX_PENDING, _HARD_MAX_PENDING = 4096, 8192
# A client that has disappeared does not answer pings. Nor does a paused one, so the timeout is long.
_PING_AFTER_MS = 60_000
_PING_TIMEOUT_MS = 30_000
# Connections without calls are closed after this time. gRPC clients reconnect automatically.
_IDLE_MS = 30 * 60_000
# File descriptors beside connections: those of the gateway, and those of a worker and its replacement.
_GATEWAY_DESCRIPTORS = 128
_DESCRIPTORS_PER_WORKER = 16
# With this many, no client can connect or no worker starts.
_TOO_FEW_DESCRIPTORS = 32
# Connections that may have said nothing, however few there may be.
_LEAST_SILENT = 16


def server_options(config: Config) -> list[tuple[str, int]]:
    """The options of the gRPC server."""
    return [
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", config.max_response_bytes),
        # Further ones are closed when accepted. The limit is per address if a name resolves to several.
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Otherwise a second server could bind the same port without an error.
        ("grpc.so_reuseport", int(config.gateways > 1)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _HARD_MAX_PENDING),
        # From accept to the first HTTP/2 frame, with TLS.
        ("grpc.server_handshake_timeout_ms", int(config.message_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        # Without this, a connection without traffic ends a minute later than the keepalive timeout says.
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        # None but "identity": 15 KB of gzip can be 16 MiB, whose unpacking holds up all connections.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Clients and server may ping on connections without calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Where there are several gateways, clients find out soon that one of them is silent.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ]


def handshake_limits(config: Config) -> HandshakeLimits:
    """How many connections of a port may have said nothing: a part, so that they do not keep others out."""
    most = max(_LEAST_SILENT, config.max_connections // 4)
    return HandshakeLimits(most, max(_LEAST_SILENT, most // 4), config.message_timeout_s)


class TooFewDescriptors(Exception):
    """The gateway cannot run with so few file descriptors. The message is for the operator."""


def with_descriptors(config: Config) -> Config:
    """The settings, with max_connections lowered if there are too few file descriptors.

    Increases the process's soft limit to twice max_connections if the hard limit allows it, because HTTP may
    have as many connections as gRPC.

    Raises:
        TooFewDescriptors: There are too few even for the gateway itself.
    """
    reserved = _GATEWAY_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * (config.workers or MAX_WORKERS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reserved + 2 * config.max_connections
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    limit = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit <= _TOO_FEW_DESCRIPTORS:
        raise TooFewDescriptors(
            f"{limit} file descriptors are too few (ulimit -n): max_connections needs {wanted}"
        )
    possible = max(1, limit - reserved)
    if possible >= config.max_connections:
        return config
    _log.warning(
        "max_connections is lowered: too few file descriptors (ulimit -n)",
        max_connections=possible,
        descriptors=limit,
    )
    return dataclasses.replace(config, max_connections=possible)
