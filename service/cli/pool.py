"""`quire pool init`: a CA and certificates for gateways and workers of several hosts."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from pathlib import Path

from service.pool.pool_files import GATEWAY_NAME, WORKER_NAME

_DEFAULT_DAYS = 3650
# A clock may be behind.
_BACKDATED = dt.timedelta(days=1)


def init(options: argparse.Namespace) -> int:
    """Writes the directory. Returns the exit status."""
    directory = Path(options.directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            print(f"quire: {directory} is not empty", file=sys.stderr)
            return 1
        for name, content in _certificates(options.days).items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        print(f"quire: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"Copy ca.pem, worker.pem and worker-key.pem of {directory} to the hosts of workers:")
    print("  quire worker --pool DIRECTORY --listen HOST:PORT")
    print("and use the directory in the gateway:")
    print(f"  quire serve --pool {directory} --workers-at HOST:PORT,HOST:PORT")
    print("ca-key.pem signs further certificates. Neither gateways nor workers need it: keep it elsewhere.")
    return 0


def _certificates(days: int) -> dict[str, bytes]:
    """The files by name: keys and certificates of the CA and of both roles."""
    # Loaded only here: servers use gRPC's own TLS.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

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
