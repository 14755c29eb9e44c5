"""TLS of gRPC and HTTP: the server's certificate, and the CA of client certificates.

The files are reloaded when they change. Open connections keep their certificates.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from service.auth.reloaded_file import ReloadedFile
from service.config import Config
from service.settings import ConfigError
from workers.common.trusted import require_trusted

_T = TypeVar("_T")


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """The credentials of gRPC, None without TLS. Raises ConfigError if the files cannot be used."""
    files = _watched(config, "certificates", _grpc_certificates)
    if files is None:
        return None

    def fetch() -> grpc.ServerCertificateConfiguration:
        # gRPC calls this for each handshake, in a thread of its own.
        files.refresh()
        return files.value

    return grpc.dynamic_ssl_server_credentials(
        files.value, fetch, require_client_authentication=bool(config.tls_client_ca)
    )


def http_context(config: Config) -> ssl.SSLContext | None:
    """The TLS context of HTTP, None without TLS. Raises ConfigError if the files cannot be used."""
    files = _watched(config, "certificates of HTTP", _context)
    if files is None:
        return None
    context = _CurrentContext(ssl.PROTOCOL_TLS_SERVER)
    context.files = files
    return context


class _CurrentContext(ssl.SSLContext):
    """Gives each connection the context of the current files, as event loops ask for it.

    A context has keys of its own for resumed sessions, which are not verified again: so a session of a client
    whose CA was removed is none here.
    """

    files: ReloadedFile[ssl.SSLContext]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        self.files.refresh()
        return self.files.value.wrap_bio(*args, **options)


def _watched(config: Config, what: str, read: Callable[[Config], _T]) -> ReloadedFile[_T] | None:
    if not config.tls_cert:
        return None
    paths = [Path(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
    try:
        return ReloadedFile(what, paths, lambda: read(config))
    except (OSError, ValueError) as error:
        raise ConfigError("tls_cert", "", config.tls_cert, str(error)) from None


def _context(config: Config) -> ssl.SSLContext:
    """Raises OSError or ValueError."""
    for path in (config.tls_cert, config.tls_key, config.tls_client_ca):
        if path:
            require_trusted(Path(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        why = error.reason or "one of them is not in PEM"
        raise ValueError(f"the certificate, its key or the CA cannot be used: {why}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _grpc_certificates(config: Config) -> grpc.ServerCertificateConfiguration:
    """Raises OSError or ValueError for bad files. gRPC would refuse every handshake without a reason."""
    _context(config)
    roots = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
    pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], roots)


def _no_password() -> str:
    """Without this, OpenSSL would ask for a password on the terminal."""
    raise ValueError("the key is encrypted")
