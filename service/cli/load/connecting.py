"""How a client process reaches the server: an asyncio channel of its own, and what goes with every call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
from quire.v1 import executor_pb2_grpc, runner_pb2_grpc

from service.cli.channel import MAX_RESPONSE_BYTES

# In the stubs of the stubs only, not at run time.
Stub: TypeAlias = "executor_pb2_grpc.ModelExecutorServiceAsyncStub"
RunnerStub: TypeAlias = "runner_pb2_grpc.ModelRunnerServiceAsyncStub"
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_MAX_REQUEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is, and who calls. The files were read, so that processes need not read them again."""

    target: str
    ca: bytes | None = None
    key: bytes | None = None
    cert: bytes | None = None
    token: str = ""

    @classmethod
    def of(cls, target: str, ca: str, key: str, cert: str, token: str) -> Server:
        """With the contents of the files named. Raises OSError."""
        ca_pem, key_pem, cert_pem = (Path(path).read_bytes() if path else None for path in (ca, key, cert))
        return cls(target, ca_pem, key_pem, cert_pem, token)

    @property
    def metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def connect(self) -> grpc.aio.Channel:
        """A channel that shares its connection with no other."""
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.max_send_message_length", _MAX_REQUEST_BYTES),
            # What fails is counted, and not tried again behind our back.
            ("grpc.enable_retries", 0),
        ]
        if self.ca is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        return grpc.aio.secure_channel(self.target, credentials, options=options)
