"""The settings of this extension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from service.config import Config, ExtensionSettings
from service.setting_rules import HOST_PORT_ADDRESS, POSTGRES, Range, Text, is_reachable
from service.settings import Conflict, Port, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaysSettings(ExtensionSettings):
    """Several gateways of this host, or of several hosts."""

    opened_by: ClassVar[str] = "service.extensions.gateways.extension:open_extension"
    served_by: ClassVar[str] = "service.extensions.gateways.extension:open_server"

    gateways: int = setting(
        1,
        "number of gateway processes behind one port, each with a part of the caches and of the workers; the"
        " caches of a data directory are of one number",
        Range(1, 64),
        group="several gateways",
    )
    shards: int = setting(
        1,
        "number of parts of the caches that gateways of several hosts share among them; fixed for a database",
        Range(1, 1024),
    )
    peer_listen: str = setting(
        "",
        "be one of several gateways with one journal in PostgreSQL: the others call this one here, by TLS"
        " with the certificates of `pool`",
        HOST_PORT_ADDRESS,
        port=Port(),
    )
    advertise: str = setting(
        "",
        "the address at which clients reach this gateway and no other; answers name that of their cache's",
        Text(is_reachable, "must be host:port or [ipv6]:port, without port 0"),
    )

    @property
    def gateways_of_host(self) -> int:
        """Those that one parent starts."""
        return self.gateways

    @property
    def has_other_hosts(self) -> bool:
        """With an address for the others."""
        return bool(self.peer_listen)

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Of several gateways of this host, or of several hosts, with other settings."""
        slots = "workers_at" if config.workers_at else "workers"
        # How many `auto` is, the machine tells at the start.
        is_known = config.workers_at or config.workers is not None
        on_one_host = (
            (slots, is_known and self.gateways > config.worker_slots, needs_a_worker(self.gateways)),
            ("listen", config.listen.startswith("unix:"), "several gateways share a port, not a Unix socket"),
            ("pool_listen", bool(config.pool_listen), "with several gateways only workers_at is possible"),
        )
        on_several = (
            ("peer_listen", not config.journal.startswith(POSTGRES), "needs journal = postgresql://..."),
            ("peer_listen", not config.workers_at, "needs workers_at, the same ones for all gateways"),
            ("workers_at", config.worker_slots < self.shards, f"each of {self.shards} shards needs one"),
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


def needs_a_worker(gateways: int) -> str:
    """Why there are too few workers."""
    return f"each of {gateways} gateways needs a worker"
