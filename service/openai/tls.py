"""TLS of the HTTP front: the certificates of the gateway, read again when they have changed."""

from __future__ import annotations

import ssl
from pathlib import Path

from service.config import Config, ConfigError
from service.doors.watched import Watched


def server_context(config: Config) -> ssl.SSLContext | None:
    """What to listen with; None without a certificate. Raises ConfigError if the files cannot be used.

    Connections that are open keep the certificates they were made with.
    """
    if not config.tls_cert:
        return None
    cert, key, client_ca = Path(config.tls_cert), Path(config.tls_key), config.tls_client_ca
    paths = [cert, key] + ([Path(client_ca)] if client_ca else [])
    try:
        files = Watched("certificates of HTTP", paths, lambda: _read(cert, key, client_ca))
    except (OSError, ValueError) as error:
        raise ConfigError("tls_cert", "the files", config.tls_cert, str(error)) from None
    first = files.value

    def choose(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        # Called in each handshake.
        files.refresh()
        if files.value is not first:
            connection.context = files.value

    first.sni_callback = choose
    return first


def _read(cert: Path, key: Path, client_ca: str) -> ssl.SSLContext:
    """Raises OSError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ValueError(f"the certificate, its key or the CA cannot be used: {error.reason}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
