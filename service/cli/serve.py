"""`quire serve`: reads the settings and runs a server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile

from service.auth.connections import TooFewDescriptors, with_descriptors
from service.config import Config, ExtensionUnusable
from service.config_sources import Settings, read_settings
from service.data_directory import StateUnusable, check_gateways, check_own_journal, data_directory, prepare
from service.extension import Extension, find_server
from service.gateway import open_gateway
from service.journal.base import Journal
from service.logging import configure_logging
from service.model_check import refusal
from service.model_names import is_hub_model
from service.printable import escaped
from service.server import run_gateway
from service.settings import ConfigError
from workers.common.protocol import EXIT_CONFIG

# Settings of the gateway that a check makes, so that it does not interfere with a running one.
_ALONE = {"listen": "127.0.0.1:0"}
# The same, for settings of an extension that may not be installed.
_EXTENSION_DEFAULTS = {"gateways": 1, "shards": 1, "peer_listen": ""}


def run(options: argparse.Namespace) -> int:
    """Serves until a signal, or only checks the settings. Returns the exit status."""
    settings = read_settings(vars(options), os.environ)
    for error in settings.errors:
        print(f"quire: {escaped(settings.said(error))}", file=sys.stderr)
    if settings.errors:
        return 2
    try:
        return _check(settings) if options.check else _run(settings.config)
    except ConfigError as error:
        print(f"quire: {escaped(settings.said(error))}", file=sys.stderr)
        return 2
    except ExtensionUnusable as error:
        print(f"quire: {escaped(str(error))}", file=sys.stderr)
        return 2
    except StateUnusable as error:
        print(f"quire: {escaped(str(error))}", file=sys.stderr)
        return 1 if error.may_pass else EXIT_CONFIG


def _check(settings: Settings) -> int:
    """Prints the given settings, then makes all parts of a gateway. Starts nothing, changes nothing on disk.

    Raises ConfigError.
    """
    values = settings.config.values()
    for name, source in settings.sources.items():
        value = json.dumps("auto" if values[name] is None else values[name])
        print(escaped(f"{name} = {value}  # {source}"))
    config = settings.config
    if problem := refusal(config):
        raise ConfigError("model", "", config.model, problem)
    alone = _ALONE | {name: default for name, default in _EXTENSION_DEFAULTS.items() if name in values}
    with tempfile.TemporaryDirectory() as directory:
        of_check = directory if data_directory(config) is not None else None
        try:
            made = with_descriptors(config.with_values(alone | {"data_dir": of_check}))
            if not (asyncio.run(_make_parts(made)) or config.has_other_hosts):
                check_own_journal(config, data_directory(config))
        except TooFewDescriptors as error:
            raise ConfigError("max_connections", "", config.max_connections, str(error)) from None
    print(f"no problems; {len(values) - len(settings.sources)} settings have their defaults")
    return 0


async def _make_parts(config: Config) -> bool:
    """Makes the parts of a gateway, which read certificates, tokens and files. Raises ConfigError.

    Returns whether an extension provides the journal.
    """
    in_memory = Extension()
    in_memory.journal = _open_in_memory
    gateway = await open_gateway(config, given=[in_memory])
    await gateway.server.stop(0)
    await gateway.finish()
    gateway.close()
    return any(one.journal is not None for one in gateway.extensions if one is not in_memory)


async def _open_in_memory(*_: object) -> Journal:
    return Journal()


def _run(config: Config) -> int:
    """Runs the server. Raises StateUnusable, and ConfigError for a setting that is checked when used."""
    if is_hub_model(config.model) and not config.has_remote_workers:
        from service.cli import hub

        try:
            found = hub.find_model(config.model, config.model_revision)
        except hub.HubError as error:
            return _failed(error, error.status)
        config = dataclasses.replace(config, model=str(found), model_revision=None)
    prepare(config)
    if problem := refusal(config):
        print(f"quire: {escaped(f'{config.model} cannot be served: {problem}')}", file=sys.stderr)
        return EXIT_CONFIG
    serve = find_server(config)
    if serve is None:
        check_gateways(data_directory(config), 1)
    configure_logging(config.log_level)
    return run_gateway(config) if serve is None else serve()


def _failed(error: Exception, status: int = 1) -> int:
    print(f"quire: {error}", file=sys.stderr)
    return status
