"""The gateway: validates, fences, journals and routes. It never imports torch."""

import os

# gRPC's own fork handlers are not for us: workers are started by exec, and the handlers only warn of it.
# Read when grpc is first imported, which happens below this package.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
