"""Several gateways, with `gateways` or `peer_listen`."""

from __future__ import annotations

import functools

from service.config import Config
from service.extension import Extension, Serve
from service.settings import needing_extra


def open_extension(config: Config) -> Extension | None:
    """Of a gateway of several hosts. Those of one host are given theirs by their process.

    Raises ConfigError if the driver of the database is not installed.
    """
    if not config.has_other_hosts:
        return None
    with needing_extra("postgres", "journal", config.journal):
        from service.extensions.gateways.several_hosts import SeveralHosts  # noqa: PLC0415 - takes time

    return SeveralHosts(config)


def open_server(config: Config) -> Serve | None:
    """The parent of the gateways of this host."""
    if config.gateways == 1:
        return None
    from service.extensions.gateways import parent  # noqa: PLC0415 - only with this setting

    return functools.partial(parent.run, config)
