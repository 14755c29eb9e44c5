"""The certificates of a pool whose workers are on other hosts: a directory with a CA of its own.

    ca.pem, ca-key.pem            the CA. Its key is only needed to sign further certificates
    gateway.pem, gateway-key.pem  what gateways show to workers
    worker.pem, worker-key.pem    what workers show to gateways

Both sides accept only certificates of this CA, and only with the name of the other role.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from service.config import ConfigError

WORKER_NAME = "worker.quire"
GATEWAY_NAME = "gateway.quire"


def gateway_certificates(pool: Path) -> tuple[bytes, bytes, bytes]:
    """CA, key and certificate of a gateway. Raises ConfigError."""
    found = []
    for name in ("ca.pem", "gateway-key.pem", "gateway.pem"):
        try:
            found.append((pool / name).read_bytes())
        except OSError as error:
            problem = f"{name} cannot be read ({error.strerror}): `quire pool init` makes such a directory"
            raise ConfigError("pool", "a setting", str(pool), problem) from None
    ca, key, certificate = found
    return ca, key, certificate


def channel_credentials(pool: Path) -> grpc.ChannelCredentials:
    """What a gateway calls workers with. Raises ConfigError."""
    return grpc.ssl_channel_credentials(*gateway_certificates(pool))


def server_credentials(pool: Path) -> grpc.ServerCredentials:
    """What a gateway is called by workers with. Raises ConfigError."""
    ca, key, certificate = gateway_certificates(pool)
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def names_of(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """The names in the certificate of a caller."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in found]
