"""Writes log lines as a worker does, on its main thread or on another: `log_lines FORMAT [another]`."""

from __future__ import annotations

import logging
import sys
import threading

from workers import process
from workers.common.worker_pb2 import WorkerConfig
from workers.logging import background_log, get_logger


def write() -> None:
    get_logger("workers.a").info("one", number=1)
    logging.getLogger("workers.b").info("other")
    try:
        raise ValueError("planted")
    except ValueError as error:
        get_logger("workers.a").exception("failed")
        logging.getLogger("workers.b").exception("failed too")
        get_logger("workers.a").error("later", exc_info=error)


if __name__ == "__main__":
    process.configure_logging(WorkerConfig(worker_id="worker-3", log_format=sys.argv[1], log_level="info"))
    if "another" in sys.argv:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        get_logger("workers.a").info("hello", what="a line\n\x1b[31mof red")
        logging.getLogger("workers.a").debug("below the level")
    background_log().drain(30)
