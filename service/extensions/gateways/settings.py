"""The settings of this extension."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from service.config import Config, ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS, POSTGRES, Range, Text, is_reachable
from service.settings import Conflict, Port, needing_extra, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaysSettings(ExtensionSettings):
    """Settings of several gateways, on this host or on several hosts."""

    gateways: int = setting(
        1,
        "number of gateway processes behind one port, each with a part of the caches and workers; fixed for a"
        " data directory",
        Range(1, 64),
        group="several gateways",
    )
    shards: int = setting(
        1,
        "number of parts of all caches, which gateways of several hosts divide among them; fixed for a"
        " database",
        Range(1, 1024),
    )
    peer_listen: str = setting(
        "",
        "be one of several gateways with one journal in PostgreSQL: where the others call this one, over TLS"
        " with the certificates of `pool`",
        HOST_PORT_ADDRESS,
        port=Port(),
    )
    advertise: str = setting(
        "",
        "the address at which clients reach this gateway and no other; answers name the one that has the"
        " cache",
        Text(is_reachable, "must be host:port or [ipv6]:port, without port 0"),
    )

    def open_extension(self, config: Config) -> Any:
        """The extension for gateways on several hosts. Gateways of one host get theirs from `process`.

        Raises ConfigError if the driver of the database is not installed.
        """
        if not self.has_other_hosts:
            return None
        with needing_extra("postgres", "journal", config.journal):
            from service.extensions.gateways.several_hosts import SeveralHosts  # noqa: PLC0415 - takes time

        return SeveralHosts(config, self.peer_listen, self.advertise, self.shards)

    def open_server(self, config: Config) -> Callable[[], int] | None:
        """The function that runs the parent of this host's gateways. None: there is only one gateway."""
        if self.gateways == 1:
            return None
        from service.extensions.gateways import parent  # noqa: PLC0415 - only with this setting

        return functools.partial(parent.run, config)

    @property
    def gateways_of_host(self) -> int:
        """The number of gateways that the parent starts."""
        return self.gateways

    @property
    def has_other_hosts(self) -> bool:
        """Whether there are gateways on other hosts."""
        return bool(self.peer_listen)

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Conflicts of these settings with each other and with those of the core."""
        # The number of workers for `auto` is known only at the start.
        are_too_few = config.workers is not None and self.gateways > config.workers
        on_one_host = (
            ("workers", are_too_few, f"each of {self.gateways} gateways needs a worker"),
            ("listen", config.listen.startswith("unix:"), "several gateways share a port, not a Unix socket"),
        )
        on_several = (
            ("peer_listen", not config.journal.startswith(POSTGRES), "needs journal = postgresql://..."),
            ("peer_listen", not config.pool_listen, "needs pool_listen, which workers of all gateways dial"),
            ("workers", config.worker_slots < self.shards, f"each of {self.shards} shards needs one"),
            ("gateways", self.gateways > 1, "must be 1 with peer_listen: start each gateway"),
        )
        alone = (("peer_listen", self.shards > 1, "shards needs peer_listen too"),)
        for others, problems in (
            (("gateways",), on_one_host if self.gateways > 1 else ()),
            (("shards", "peer_listen"), on_several if self.peer_listen else alone),
        ):
            for name, is_wrong, problem in problems:
                if is_wrong:
                    yield (name, *others), problem
