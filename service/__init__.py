"""The gateway: validates, fences, journals and routes requests. It never imports torch."""

import os

# gRPC's fork handlers are not needed: workers are started by exec, and the handlers would only log a warning.
# grpc reads both variables when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# gRPC's core writes a line to standard error for each failed handshake, with blocking writes: a full pipe
# would stop the gateway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
