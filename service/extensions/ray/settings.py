"""The settings of this extension."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from service.config import Config, ExtensionSettings
from service.setting_rules import FILE, Text
from service.settings import Conflict, setting

_RESOURCE = re.compile(r"[\w.:/-]+=\d+(\.\d+)?", re.ASCII)


def _are_resources(value: str) -> bool:
    """Whether it is a list of NAME=NUMBER with commas, or empty."""
    return not value or all(_RESOURCE.fullmatch(part) for part in value.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings(ExtensionSettings):
    """Workers on the nodes of a Ray cluster."""

    opened_by: ClassVar[str] = "service.extensions.ray.extension:open_extension"

    ray_address: str = setting(
        "",
        "let this Ray cluster start the workers: host:port or auto on one of its nodes, ray://host:port"
        " elsewhere; the model has to be in the paths of the nodes",
        Text(lambda _: True, "must be an address as ray.init has it"),
        group="Ray",
    )
    ray_resources: str = setting(
        "",
        "what a worker takes of a Ray node, such as GPU=1,CPU=4; the default is GPU=1, or CPU=1 if the"
        " cluster has no GPU or device is cpu",
        Text(_are_resources, "must be NAME=NUMBER, or several separated by commas"),
    )
    ray_runtime_env: str = setting("", "JSON file of the runtime environment of workers on Ray", FILE)

    @property
    def starts_workers(self) -> bool:
        """With an address."""
        return bool(self.ray_address)

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """With other ways to get workers, and with what needs workers of this machine."""
        if not self.ray_address:
            return
        for name in ("workers_at", "pool_listen"):
            if getattr(config, name):
                yield (name, "ray_address"), "or ray_address, not both"
        if not config.orphan_grace_s:
            problem = "must be above 0 with ray_address: workers outlive what has started them"
            yield ("orphan_grace_s", "ray_address"), problem
        if config.gateways > 1:
            yield ("ray_address", "gateways"), "is not possible with several gateways of a host"
