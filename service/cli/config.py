"""`quire config`: checks the settings of `quire serve`, shows them, and prints the schema of their file.

What only shows at the start is checked by the code that the server itself uses. Nothing is changed: a
directory that is not there is not made, and a journal is read from a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.state import unused
from service.config import Config, ConfigError
from service.config_sources import Settings, json_schema, line_of, read_settings
from service.data_directory import data_directory, require_writable
from service.journal.base import JournalUnusable
from service.journal.segments import has_journal
from service.logging import configure_logging
from service.model_names import is_hub_id
from service.postgres.errors import DatabaseFailed
from service.printable import escaped
from service.quantised import quantised
from service.setting_rules import POSTGRES
from workers.common.trusted import require_trusted

if TYPE_CHECKING:
    from service.postgres.database import Database


def check(options: argparse.Namespace) -> int:
    """Prints all problems. Returns the exit status: 1 if there are any."""
    configure_logging("error", "pretty", sys.stderr)
    settings = _read(options)
    problems = [settings.said(error) for error in settings.errors]
    # Without the file, settings have defaults, of which nothing is to be said.
    if not any(error.setting == "config" for error in settings.errors):
        problems += _problems_at_start(settings, is_running=options.running)
    for problem in problems:
        print(f"quire: {escaped(problem)}", file=sys.stderr)
    if problems:
        return 1
    count = f"{len(settings.sources)} of {len(Config.__dataclass_fields__)} settings are given"
    print(escaped(f"{settings.file or 'no file'}: {count}, no problems"))
    return 0


def show(options: argparse.Namespace) -> int:
    """Prints each setting with its value and source. Returns the exit status: 1 if one is refused."""
    settings = _read(options)
    refused = {error.setting for error in settings.errors}
    values = {
        name: {"value": getattr(settings.config, name), "source": settings.sources.get(name, "default")}
        | ({"refused": True} if name in refused else {})
        for name in Config.__dataclass_fields__
    }
    if options.json:
        print(json.dumps(values, indent=2))
    else:
        width = max(map(len, values))
        for name, found in values.items():
            value = json.dumps("auto" if found["value"] is None else found["value"])
            note = "; a given value is refused" if name in refused else ""
            print(escaped(f"{name:{width}}  {value:<24}  {_of(settings, name)}{note}"))
    for error in settings.errors:
        print(f"quire: {escaped(settings.said(error))}", file=sys.stderr)
    return 1 if settings.errors else 0


def schema(_: argparse.Namespace) -> int:
    """Prints the JSON schema of the file. Returns the exit status."""
    print(json.dumps(json_schema(), indent=2))
    return 0


def _read(options: argparse.Namespace) -> Settings:
    flags = vars(options)
    return read_settings(flags | {"config": flags["file"] or flags["config"]}, os.environ)


def _of(settings: Settings, name: str) -> str:
    """Where the value of a setting is from, in words."""
    source = settings.sources.get(name)
    if source is None:
        return "default"
    if source == settings.file:
        return f"file {source}{line_of(source, name)}"
    return f"flag {source}" if source.startswith("--") else f"environment {source}"


def _problems_at_start(settings: Settings, *, is_running: bool) -> Iterator[str]:
    """Why a start would fail. A setting that is refused has its default, of which nothing is said."""
    config = settings.config
    refused = {error.setting for error in settings.errors}
    checks = [_model, _descriptors, _access, _extensions, _state, _database]
    for check_one in checks if is_running else (*checks, _addresses, _not_in_use):
        for error in check_one(config):
            if error.setting not in refused:
                yield settings.said(error)


def _model(config: Config) -> Iterator[ConfigError]:
    served, missing = _served(config)
    if missing and config.model_download == "off":
        yield ConfigError("model", "", config.model, missing)
    if not (missing or config.has_remote_workers) and (problem := quantised(Path(served.model))):
        yield ConfigError("model", "", config.model, problem)


def _served(config: Config) -> tuple[Config, str]:
    """What a start goes on with: the directory of a model of the hub. Or why it is not there."""
    if not is_hub_id(config.model) or config.has_remote_workers:
        return config, ""
    from service.cli import hub

    try:
        found = hub.find_model(config.model, config.model_revision, download=False)
    except hub.HubError as error:
        return config, str(error)
    return dataclasses.replace(config, model=str(found), model_revision=None), ""


def _descriptors(config: Config) -> Iterator[ConfigError]:
    from service.auth.connections import TooFewDescriptors, with_descriptors

    try:
        with_descriptors(config)
    except TooFewDescriptors as error:
        yield ConfigError("max_connections", "", config.max_connections, str(error))


def _access(config: Config) -> Iterator[ConfigError]:
    from service.auth.authenticator import Authenticator
    from service.auth.tls import server_credentials
    from service.pool.pool_files import channel_credentials

    readers: Sequence[Callable[[Config], object]] = (
        server_credentials,
        Authenticator.of,
        lambda config: channel_credentials(Path(config.pool)) if config.pool else None,
    )
    for read in readers:
        try:
            read(config)
        except ConfigError as error:
            yield error


def _addresses(config: Config) -> Iterator[ConfigError]:
    from service.auth.unix_socket import LockedUnixSocket
    from workers.common.addresses import ADDRESS_IS_FREE, why_not_listening

    for name, _, address in config.addresses():
        problem: str | None = ADDRESS_IS_FREE
        if address.startswith("unix:"):
            try:
                LockedUnixSocket(address.removeprefix("unix:")).close()
            except OSError as error:
                problem = error.strerror
        else:
            problem = why_not_listening(address)
        if problem != ADDRESS_IS_FREE:
            yield ConfigError(name, "", address, f"cannot listen: {problem}")


def _extensions(config: Config) -> Iterator[ConfigError]:
    """Checks that what the settings ask for is installed."""
    from service.extension import open_extensions

    try:
        for extension in open_extensions(config):
            extension.close()
    except ConfigError as error:
        yield error


def _database(config: Config) -> Iterator[ConfigError]:
    """Checks that the database of the journal can be reached, if it is in one."""
    if not config.journal.startswith(POSTGRES):
        return
    try:
        from service.postgres.database import Database  # its driver is an extra

        asyncio.run(_ask(Database(config.journal)))
    except ModuleNotFoundError as error:
        yield ConfigError("journal", "", config.journal, f"needs {error.name}, of the extra postgres")
    except DatabaseFailed as error:
        yield ConfigError("journal", "", config.journal, f"the database cannot be used: {error}")


async def _ask(database: Database) -> None:
    await database.fetch("SELECT 1")
    await database.close()


def _state(config: Config) -> Iterator[ConfigError]:
    """Checks that the data directory can be written to, and that what a start reads in it can be read."""
    from service.cli.journal import read_journal

    config, _ = _served(config)
    directory = data_directory(config)
    if directory is None:
        if config.journal == "disk":
            yield ConfigError("journal", "", "disk", "needs a data_dir if the port is chosen at each start")
        return
    if config.peer_listen:
        # Their state is in the database. See `prepare`.
        return
    try:
        require_trusted(directory)
    except OSError as error:
        if error.errno == errno.EPERM:
            yield ConfigError("data_dir", "", str(directory), f"{error.filename}: {error.strerror}")
            return
    # Path.exists raises if a directory of the path cannot be read.
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110
    try:
        require_writable(there)
    except OSError as error:
        # Without a journal there nothing has to be written.
        if config.journal != "memory":
            why = f"cannot be written to ({error.strerror})" if there.is_dir() else "is a file"
            yield ConfigError("data_dir", "", str(directory), f"{there} {why}")
        return
    model_tag = None
    if config.journal in ("auto", "disk") and has_journal(directory):
        try:
            model_tag = read_journal(directory).model_tag
        except JournalUnusable as error:
            yield ConfigError("data_dir", "", str(directory), str(error))
    yield from _loaded_last(config, directory, model_tag)


def _loaded_last(config: Config, directory: Path, model_tag: str | None) -> Iterator[ConfigError]:
    """Checks that weights that LoadWeights has loaded are there. `model_tag`: of the journal."""
    from service.pool import model_versions as versions

    stored, model = versions.read_served_model(directory), config.model
    if stored is None or is_hub_id(model):
        return
    configured, (_, newest) = versions.model_argument(model), versions.from_model_tag(model_tag)
    served = versions.choose_served_model(stored, configured, newest).model
    if versions.is_gone(served, configured):
        gone = f"{served} was loaded last, and is gone: put it back, or remove the directory with its caches"
        yield ConfigError("data_dir", "", str(directory), gone)


def _not_in_use(config: Config) -> Iterator[ConfigError]:
    directory = data_directory(_served(config)[0])
    if directory is not None and directory.is_dir():
        with unused(directory) as is_unused:
            if not is_unused:
                problem = "a server uses it: end it, or check with --running"
                yield ConfigError("data_dir", "", str(directory), problem)
