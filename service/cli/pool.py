"""`quire pool init`: a CA and certificates for gateways and workers of several hosts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.pool.pool_files import write_certificates
from workers.common.trusted import make_private


def init(options: argparse.Namespace) -> int:
    """Writes the directory. Returns the exit status."""
    directory = Path(options.directory)
    try:
        make_private(directory)
        if any(directory.iterdir()):
            print(f"quire: {directory} is not empty", file=sys.stderr)
            return 1
        write_certificates(directory, options.days)
    except OSError as error:
        print(f"quire: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"Copy ca.pem, worker.pem and worker-key.pem of {directory} to the hosts of workers:")
    print("  quire worker --pool DIRECTORY --gateway HOST:PORT")
    print("and use the directory in the gateway:")
    print(f"  quire serve --pool {directory} --pool-listen HOST:PORT --workers 2")
    print("ca-key.pem signs further certificates. Neither gateways nor workers need it: keep it elsewhere.")
    return 0
