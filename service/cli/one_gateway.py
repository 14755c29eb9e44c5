"""Runs one gateway in this process: the only one, or one of several."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Mapping, Sequence

import uvloop

from service.auth.connections import TooFewDescriptors, with_descriptors
from service.config import Config
from service.extension import Extension
from service.logging import configure_logging
from service.server import serve
from workers.common.switching import switch_often


def run_gateway(
    config: Config, extensions: Sequence[Extension] = (), log_fields: Mapping[str, object] | None = None
) -> int:
    """Runs a gateway in this process. Raises ConfigError. `extensions`: beside those that are found."""
    configure_logging(config.log_level, fields=log_fields)
    try:
        # Before the event loop, which uses file descriptors, too.
        config = with_descriptors(config)
    except TooFewDescriptors as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    switch_often()
    # What is loaded stays. Looking at it, a full pass of the garbage collector stopped the loop for 40 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, extensions))
