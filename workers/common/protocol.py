"""What a gateway and its workers agree on, beside the messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from quire.v1 import types_pb2

from workers.common import worker_pb2

# Digest of the messages: both sides need the same. Not of how they are framed (`message_stream`).
PROTOCOL = hashlib.blake2b(
    worker_pb2.DESCRIPTOR.serialized_pb + types_pb2.DESCRIPTOR.serialized_pb, digest_size=16
).hexdigest()
# A batch of commands or events that is larger is sent in several messages.
TARGET_MESSAGE_BYTES = 4 << 20
# Added to the size limits of clients' messages, so that a client never meets the limit of the stream.
HOP_SLACK_BYTES = 16 << 20
# The option of a channel between gateways. They reach each other without the proxy that the environment may
# name, which is for others.
DIRECT = ("grpc.enable_http_proxy", 0)
# The names in the certificates of the two roles.
WORKER_NAME = "worker.quire"
GATEWAY_NAME = "gateway.quire"
# The exit status of a worker that would fail again with the same configuration (EX_CONFIG in sysexits.h).
EXIT_CONFIG = 78


def without(config: worker_pb2.WorkerConfig, fields: Iterable[str]) -> worker_pb2.WorkerConfig:
    """A copy of a configuration without some of its fields, to be compared with another."""
    copy = worker_pb2.WorkerConfig()
    copy.CopyFrom(config)
    for name in fields:
        copy.ClearField(name)
    return copy
