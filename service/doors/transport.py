"""How gRPC treats connections: how much at once, and when one is given up that nobody is behind."""

from __future__ import annotations

from service.config import Config

# Calls of one connection at once; a client's further ones wait on its side.
_MAX_STREAMS = 4096
# Calls that the event loop has not taken up yet. Beyond the first gRPC cancels some of those that come,
# beyond the second all, and tells nobody why: so it is for floods that nobody could look at one by one.
_MAX_PENDING, _MOST_PENDING = 4096, 8192
# Who has gone without a word does not answer a ping; nor does who is stopped, for a moment or longer.
_PING_AFTER_MS = 60_000
_PING_TIMEOUT_MS = 30_000
# A connection without calls is closed after so long; clients of gRPC make a new one by themselves when they
# need it.
_IDLE_MS = 30 * 60_000


def server_options(config: Config) -> list[tuple[str, int]]:
    """The options of a gRPC server with these settings."""
    return [
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", config.max_response_bytes),
        # Otherwise a second server binds the same port without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
        # From accepting to the first frame of HTTP/2, TLS included.
        ("grpc.server_handshake_timeout_ms", int(config.message_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        # The other alone does not end a connection on which nothing comes: this one would after a minute.
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        # Both ways: clients may ping without calls, and so does the server.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
