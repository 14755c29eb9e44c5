"""The values that settings can have: rules that fields of `Config` name, and how addresses are read."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import re
import urllib.parse
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import PurePosixPath

from service.model_names import MAX_HUB_ID
from service.outbound import is_this_machine
from workers.common.addresses import MAX_SOCKET_PATH_BYTES

AUTO = "auto"
# What the address of a journal in PostgreSQL begins with.
POSTGRES = ("postgresql://", "postgres://")
# With the second, each commit is on the disk before it is answered.
DISK_JOURNALS = ("disk", "disk-fsync")
DTYPES = (AUTO, "bfloat16", "float16", "float32")
# The names in the tables of service/text/output_formats.py.
TOOL_CALL_PARSERS = (
    AUTO, "none", "openai", "kimi_k2", "deepseek_v3", "deepseek_v31", "deepseek_v32", "minimax_m2", "mistral",
    "mistral_list", "glm45", "seed_oss", "functionary", "qwen3_coder", "hunyuan_a13b", "nemotron_json",
    "granite", "hermes", "lfm2", "gemma4", "functiongemma", "llama4_pythonic", "pythonic", "llama3_json",
)  # fmt: skip
REASONING_PARSERS = (AUTO, "none", "openai", "gemma4", "mistral", "seed_oss", "think")
_KIB, MIB = 1 << 10, 1 << 20
_REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.))\w[\w./-]*[\w-]|\w", re.ASCII)
MAX_WORKERS = 256
MAX_PORT = 65_535
DAY_S = 86_400


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The valid numbers, inclusive. NaN is not in it."""

    minimum: float
    maximum: float


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Whether a text is valid, and the valid texts in words."""

    accepts: Callable[[str], bool]
    allowed: str


# The last ones are the valid texts themselves.
Rule = Range | Text | tuple[str, ...]


def is_file(value: str) -> bool:
    """Whether it names a file, or nothing."""
    # Path.is_file raises if a directory of the path cannot be read.
    return not value or os.path.isfile(value)  # noqa: PTH113


def is_private(listen: str) -> bool:
    """Whether only this machine can reach the address. Any host name but localhost may be remote."""
    return listen.startswith("unix:") or is_this_machine(listen.rpartition(":")[0].strip("[]"))


def is_listen_address(value: str) -> bool:
    """Whether it is host:port, [ipv6]:port or unix:/path. Raises UnicodeError for what is no host name."""
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        return path.startswith("/") and len(path.encode()) <= MAX_SOCKET_PATH_BYTES
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        return False
    host.encode("idna")
    # An IPv6 address contains colons, so it needs brackets.
    return ":" not in host or (host.startswith("[") and host.endswith("]"))


def with_port(address: str, further: int) -> str:
    """The address with a port that is higher by `further`. Port 0, a free one each time, stays."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + further}" if int(port) else address


def overlap(one: str, other: str) -> bool:
    """Whether only one of two addresses can be bound, as far as their texts say."""
    if one.startswith("unix:") or other.startswith("unix:"):
        return one == other
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    hosts = {_host(host), _host(other_host)}
    takes_all = IPv6Address(0) in hosts or (
        IPv4Address(0) in hosts and not any(isinstance(name, IPv6Address) for name in hosts)
    )
    return int(port) == int(other_port) != 0 and (len(hosts) == 1 or takes_all)


def _host(name: str) -> object:
    """A host, so that two texts for one address are the same."""
    try:
        return ipaddress.ip_address("127.0.0.1" if name.lower() == "localhost" else name.strip("[]"))
    except ValueError:
        return name.lower()


def is_directory(value: str) -> bool:
    """Whether it names a directory, or nothing."""
    return not value or os.path.isdir(value)  # noqa: PTH112 - see is_file


def is_absolute_path(value: str) -> bool:
    """Whether it names a place that is the same from any working directory."""
    return PurePosixPath(value).is_absolute() and "\0" not in value


def is_path(value: str) -> bool:
    """Whether it names something."""
    return bool(value)


def is_http_address(value: str) -> bool:
    """Whether it is host:port or [ipv6]:port, or empty. Raises UnicodeError as `is_listen_address`."""
    return not value or (is_listen_address(value) and not value.startswith("unix:"))


def are_addresses(value: str) -> bool:
    """Whether it is a list of host:port with commas, all different and none with port 0, or empty."""
    addresses = value.split(",") if value else []
    are_valid = all(address and is_http_address(address) and _port(address) for address in addresses)
    return are_valid and not any(overlap(*pair) for pair in itertools.combinations(addresses, 2))


def is_reachable(value: str) -> bool:
    """Whether it is host:port of a port that others can call, or empty."""
    return is_http_address(value) and (not value or _port(value) > 0)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def is_journal(value: str) -> bool:
    """Whether it is a kind of journal, or the address of one elsewhere, which has no password in it."""
    if "://" not in value:
        return value in (AUTO, *DISK_JOURNALS, "memory")
    address = urllib.parse.urlsplit(value)
    asked = urllib.parse.parse_qs(address.query, keep_blank_values=True)
    return ":" not in address.netloc.rpartition("@")[0] and not {"password", "sslpassword"} & asked.keys()


def is_revision(value: str) -> bool:
    """Whether it can be a commit, branch or tag."""
    return len(value) <= MAX_HUB_ID and bool(_REVISION.fullmatch(value))


FILE = Text(is_file, "must be a file")
HOST_PORT_ADDRESS = Text(is_http_address, "must be host:port or [ipv6]:port")
SWITCH = ("off", "on")
COUNT = Range(1, 1 << 20)
TIMEOUT_S = Range(0.1, DAY_S)
GRACE_S = Range(0, DAY_S)
MEMORY_BYTES = Range(_KIB, 1 << 50)
# The size of a gRPC message is a signed 32-bit number.
MESSAGE_BYTES = Range(_KIB, (1 << 31) - 1)
