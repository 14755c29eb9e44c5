"""The certificates of a pool whose workers are on other hosts: a directory with a CA of its own.

    ca.pem, ca-key.pem            the CA. Its key is only needed to sign further certificates
    gateway.pem, gateway-key.pem  what gateways show to workers
    worker.pem, worker-key.pem    what workers show to gateways

Both sides accept only certificates of this CA, and only with the name of the other role.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from pathlib import Path

import grpc

from service.pool.worker_port import WorkerPort
from service.settings import ConfigError
from workers.common.pool_tls import tls_context
from workers.common.protocol import GATEWAY_NAME, WORKER_NAME
from workers.common.trusted import require_trusted

# A clock may be behind.
_BACKDATED = dt.timedelta(days=1)


def gateway_certificates(pool: Path) -> tuple[bytes, bytes, bytes]:
    """CA, key and certificate of a gateway. Raises ConfigError."""
    found = []
    for name in ("ca.pem", "gateway-key.pem", "gateway.pem"):
        try:
            require_trusted(pool / name)
            found.append((pool / name).read_bytes())
        except OSError as error:
            problem = f"{name} cannot be read ({error.strerror}): `quire pool init` makes such a directory"
            raise ConfigError("pool", "", str(pool), problem) from None
    ca, key, certificate = found
    return ca, key, certificate


def channel_credentials(pool: Path) -> grpc.ChannelCredentials:
    """The credentials with which a gateway calls others. Raises ConfigError."""
    return grpc.ssl_channel_credentials(*gateway_certificates(pool))


def server_credentials(pool: Path) -> grpc.ServerCredentials:
    """The credentials with which a gateway serves others. Raises ConfigError."""
    ca, key, certificate = gateway_certificates(pool)
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def worker_port(listen: str, pool: Path) -> WorkerPort:
    """The port that workers of the pool dial; it is not open yet. Raises ConfigError."""
    key = secret(pool).encode()
    try:
        return WorkerPort(listen, tls_context(pool, "gateway", is_server=True), key)
    except OSError as error:
        problem = f"has certificates that cannot be used ({error.strerror})"
        raise ConfigError("pool", "", str(pool), problem) from None


def secret(pool: Path) -> str:
    """A secret that only the gateways of a pool know. Raises ConfigError."""
    _, key, _ = gateway_certificates(pool)
    return hashlib.sha256(b"quire gateways" + key).hexdigest()


def write_certificates(directory: Path, days: int) -> None:
    """Writes the files of a new pool. Raises OSError."""
    for name, content in _certificates(days).items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _certificates(days: int) -> dict[str, bytes]:
    """The files by name: keys and certificates of the CA and of both roles."""
    # Loaded only here: servers use gRPC's own TLS.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    begins = dt.datetime.now(dt.UTC) - _BACKDATED
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Quire pool")])
    files = {}
    for role, name in (("ca", ""), ("gateway", GATEWAY_NAME), ("worker", WORKER_NAME)):
        key = ca_key if role == "ca" else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) if name else ca_name
        builder = (
            x509.CertificateBuilder(ca_name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + _BACKDATED + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=role == "ca", path_length=None), critical=True)
        )
        if name:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
        pem = serialization.Encoding.PEM
        files[f"{role}.pem"] = builder.sign(ca_key, hashes.SHA256()).public_bytes(pem)
        files[f"{role}-key.pem"] = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    return files
