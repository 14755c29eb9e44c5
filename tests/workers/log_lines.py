"""Writes log lines as a worker does, on its main thread or on another: `log_lines FORMAT [another]`."""

from __future__ import annotations

import logging
import sys
import threading

import structlog
from quire.v1.worker_pb2 import WorkerConfig

from workers import process
from workers.logging import background_log


def write() -> None:
    structlog.get_logger("workers.a").info("one")
    logging.getLogger("workers.b").info("other")


if __name__ == "__main__":
    process.configure_logging(WorkerConfig(worker_id="worker-3", log_format=sys.argv[1], log_level="info"))
    if "another" in sys.argv:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        structlog.get_logger("a").info("hello")
    background_log().drain(30)
