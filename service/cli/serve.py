"""`quire serve`: reads the settings and runs a server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from service.adapters.store import bad_adapter
from service.auth.connections import TooFewDescriptors, with_descriptors
from service.config import Config, ConfigError
from service.config_sources import read_settings
from service.data_directory import StateUnusable, data_directory, prepare
from service.errors import LoadFailed
from service.logging import configure_logging
from service.model_names import has_other_format, is_hub_id
from service.printable import escaped
from service.quantised import quantised
from service.server import serve
from service.shards.one_host import Membership, check_count
from workers.common.adapter_files import FILES
from workers.common.protocol import EXIT_CONFIG
from workers.common.switching import switch_often


def run(options: argparse.Namespace) -> int:
    """Serves until a signal. Returns the exit status."""
    settings = read_settings(vars(options), os.environ)
    for error in settings.errors:
        print(f"quire: {escaped(settings.said(error))}", file=sys.stderr)
    if settings.errors:
        models = [error for error in settings.errors if error.setting == "model"]
        return EXIT_CONFIG if any(has_other_format(str(error.value)) for error in models) else 2
    try:
        return _run(settings.config)
    except ConfigError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except StateUnusable as error:
        print(f"quire: {escaped(str(error))}", file=sys.stderr)
        return 1 if error.may_pass else EXIT_CONFIG


def _run(config: Config) -> int:
    """Raises ConfigError for a setting that is checked only when it is used, or StateUnusable."""
    prepare(config)
    may_download = config.model_download == "on"
    if is_hub_id(config.model) and not config.has_remote_workers:
        from service.cli import hub

        try:
            found = hub.find_model(config.model, config.model_revision, download=may_download)
        except hub.HubError as error:
            return _failed(error, error.status)
        config = dataclasses.replace(config, model=str(found), model_revision=None)
    if not config.has_remote_workers and (problem := quantised(Path(config.model))):
        print(f"quire: {escaped(f'{config.model} cannot be served: {problem}')}", file=sys.stderr)
        return EXIT_CONFIG
    if config.gateways > 1:
        from service.cli import gateways

        configure_logging(config.log_level, config.log_format)
        return gateways.run(config)
    check_count(data_directory(config), 1)
    return run_gateway(config)


def run_gateway(config: Config, member: Membership | None = None) -> int:
    """Runs a gateway in this process. Raises ConfigError. `member`: see `Gateway`."""
    fields = {} if member is None else {"gateway": member.shard.index}
    configure_logging(config.log_level, config.log_format, fields=fields)
    may_download = config.model_download == "on"
    try:
        # Before the event loop, which uses file descriptors, too.
        config = with_descriptors(config)
    except TooFewDescriptors as error:
        return _failed(error)
    switch_often()
    # What is loaded stays. Looking at it, a full pass of the garbage collector stopped the loop for 40 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        find = functools.partial(_find_on_hub, download=may_download)
        find_adapter = functools.partial(_find_adapter_on_hub, download=may_download)
        return runner.run(serve(config, find, find_adapter, member))


def _failed(error: Exception, status: int = 1) -> int:
    print(f"quire: {error}", file=sys.stderr)
    return status


def _find_on_hub(hub_id: str, on_progress: Callable[[float], None], *, download: bool) -> Path:
    """Finds a model for LoadWeights. Raises LoadFailed."""
    from service.cli import hub

    try:
        return hub.find_model(hub_id, None, download=download, on_progress=on_progress)
    except hub.HubError as error:
        raise LoadFailed(str(error)) from None


def _find_adapter_on_hub(hub_id: str, *, download: bool) -> Path:
    """Finds an adapter for LoadAdapter. Raises InvalidArgument."""
    from service.cli import hub

    try:
        return hub.find_files(hub_id, FILES, download=download)
    except hub.HubError as error:
        raise bad_adapter(str(error)) from None
