"""TLS between the gateways and the workers of a pool, by certificates that name a role and not a host."""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from pathlib import Path

from workers.common.trusted import require_trusted


def tls_context(pool: Path, role: str, *, is_server: bool) -> ssl.SSLContext:
    """Shows the certificate of a role, and requires one of the same CA. Blocks. Raises OSError.

    A client also requires that the certificate has the name that it connects to.
    """
    ca, key, certificate = (pool / name for name in ("ca.pem", f"{role}-key.pem", f"{role}.pem"))
    for path in (ca, key, certificate):
        require_trusted(path)
        # What OpenSSL raises does not name the file.
        path.open("rb").close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ca)
    context.load_cert_chain(certificate, key)
    return context


def names_of_peer(transport: BaseTransport) -> list[str]:
    """The names in the certificate of the other side."""
    certificate = transport.get_extra_info("peercert") or {}
    return [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
