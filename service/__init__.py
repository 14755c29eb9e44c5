"""The gateway: validates, fences, journals and routes. It never imports torch."""

import os

# gRPC's own fork handlers are not for us: workers are started by exec, and the handlers only warn of it.
# Read when grpc is first imported, which happens below this package.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# Its core writes to standard error itself, a line for each handshake that fails, and waits for whoever reads
# it: a pipe that is full would stop the gateway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
