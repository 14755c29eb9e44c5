"""The server's certificate, and whose clients it trusts: read again when they have changed."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from service.config import Config, ConfigError
from service.doors.watched import Watched


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """What to listen with; None without a certificate. Raises ConfigError if the files cannot be used.

    Connections that are open keep the certificates they were made with.
    """
    if not config.tls_cert:
        return None
    cert, key, client_ca = Path(config.tls_cert), Path(config.tls_key), config.tls_client_ca
    paths = [cert, key] + ([Path(client_ca)] if client_ca else [])
    try:
        files = Watched("certificates", paths, lambda: _read(cert, key, client_ca))
    except (OSError, ValueError) as error:
        raise ConfigError("tls_cert", "the files", config.tls_cert, str(error)) from None

    def fetch() -> grpc.ServerCertificateConfiguration:
        # Called for each handshake, in a thread of gRPC's.
        files.refresh()
        return files.value

    return grpc.dynamic_ssl_server_credentials(
        files.value, fetch, require_client_authentication=bool(client_ca)
    )


def _read(cert: Path, key: Path, client_ca: str) -> grpc.ServerCertificateConfiguration:
    """Raises OSError or ValueError: gRPC itself would refuse every handshake, and not say why."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
        if client_ca:
            context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise ValueError(f"the certificate, its key or the CA cannot be used: {error.reason}") from None
    roots = Path(client_ca).read_bytes() if client_ca else None
    return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())], roots)


def _no_password() -> str:
    """Else OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted")
