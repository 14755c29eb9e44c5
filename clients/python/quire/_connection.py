"""Connection settings of a client: the channel's options, TLS, and the token in every call's metadata."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
from quire._proxies import channel_options, is_private, require_target

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_MAX_REQUEST_BYTES = 16 << 20
DEFAULT_MAX_RESPONSE_BYTES = 64 << 20

# PEM data of certificates or of a key, or the path of a PEM file.
Pem: TypeAlias = bytes | str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS settings. Files are read when the client is created.

    Attributes:
        ca: The trusted certificate authorities. None: the public ones that gRPC includes.
        cert: The client's own certificate, for servers with `--tls-client-ca`. Requires `key`.
        key: The private key of `cert`.
        server_name: The name in the server's certificate, if it differs from the target's.
    """

    ca: Pem | None = None
    cert: Pem | None = None
    key: Pem | None = None
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings of a channel, and the metadata of every call on it."""

    # None: no TLS.
    credentials: grpc.ChannelCredentials | None
    options: list[tuple[str, int | str]]
    metadata: tuple[tuple[str, str], ...] | None

    def options_for(self, target: str) -> list[tuple[str, int | str]]:
        """The options of the channel to one of the targets."""
        return [*self.options, *channel_options(target)]


def connection(
    targets: Sequence[str],
    *,
    tls: Tls | grpc.ChannelCredentials | bool,
    token: str,
    token_in_plain_view: bool,
    max_request_bytes: int,
    max_response_bytes: int,
    retries: bool = True,
) -> Connection:
    """Checks a client's arguments. Raises ValueError for invalid settings, OSError for unreadable files."""
    for target in targets:
        try:
            require_target(target)
        except ValueError as error:
            raise ValueError(f"the target {target!r} is refused: {error}") from None
    # Of several gateways one that answers no ping is left soon: the next attempt goes to another one. A
    # single one may be paused.
    ping_after_ms, ping_timeout_ms = (2_000, 3_000) if len(targets) > 1 else (20_000, 20_000)
    # No retry policy, because a channel cannot see which request is fenced. It still resends a request that
    # no server has received.
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", max_request_bytes),
        ("grpc.max_receive_message_length", max_response_bytes),
        ("grpc.enable_retries", int(retries)),
        # gRPC would try again after up to two minutes only.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Without pings a call would wait forever for a server whose host has disappeared.
        ("grpc.keepalive_time_ms", ping_after_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        # Also while a call is quiet: otherwise, after two pings, one a minute.
        ("grpc.http2.max_pings_without_data", 0),
    ]
    credentials = tls if isinstance(tls, grpc.ChannelCredentials) else None
    if tls is True:
        tls = Tls()
    if isinstance(tls, Tls):
        credentials = _credentials(tls)
        if tls.server_name:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
    others = [target for target in targets if not is_private(target)]
    if token and credentials is None and others and not token_in_plain_view:
        raise ValueError(
            f"without TLS the token would go to {', '.join(others)} in plain view: "
            "give tls, or token_in_plain_view=True"
        )
    return Connection(credentials, options, _bearer(token))


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.cert is None) != (tls.key is None):
        raise ValueError("cert and key go together")
    return grpc.ssl_channel_credentials(
        _pem("ca", tls.ca), private_key=_pem("key", tls.key), certificate_chain=_pem("cert", tls.cert)
    )


def _pem(name: str, pem: Pem | None) -> bytes | None:
    if pem is None:
        return None
    content = pem if isinstance(pem, bytes) else Path(pem).read_bytes()
    if b"-----BEGIN " not in content:
        # gRPC would report only a failed connection, and only at the first call.
        raise ValueError(f"{name} is not in PEM" + ("" if isinstance(pem, bytes) else f": {pem}"))
    return content


def _bearer(token: str) -> tuple[tuple[str, str], ...] | None:
    """The metadata of calls with a token. Raises ValueError, without showing the token, if it is invalid."""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("a token has printable ASCII characters only")
    return (("authorization", f"Bearer {token}"),) if token else None
