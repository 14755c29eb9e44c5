"""Targets: which there can be, which are on this machine, and gRPC's HTTP proxy to the others.

gRPC takes the proxy from the environment, and uses it for loopback addresses, too: see `channel_options`.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

# In gRPC's order. The first one that is set counts.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_MAX_PORT = 65_535


def require_target(target: str) -> None:
    """Raises ValueError where gRPC would resolve a URL as a name, or take a port modulo 65,536."""
    if not target or target.startswith(("http://", "https://")):
        raise ValueError("must be HOST:PORT, without http://")
    ports = () if _is_unix(target) else (address.rpartition(":")[2] for address in _addresses(target))
    if any(port.isdecimal() and int(port) > _MAX_PORT for port in ports):
        raise ValueError(f"must have a port up to {_MAX_PORT}")


def channel_options(target: str) -> list[tuple[str, int | str]]:
    """The options that a channel to a target needs: no proxy can reach a server on this machine."""
    return [("grpc.enable_http_proxy", 0)] if _is_here(target) else []


def proxy_of(target: str) -> str:
    """The proxy of a target, as `HOST:PORT of VARIABLE`, for messages. Empty: there is none."""
    variable = next((name for name in _PROXIES if os.environ.get(name)), "")
    if not variable or _is_here(target) or all(map(_is_excepted, _addresses(target))):
        return ""
    proxy = urlsplit(os.environ[variable])
    if proxy.scheme != "http":
        return ""  # gRPC ignores it.
    # Without the credentials that it may contain.
    return f"{proxy.netloc.rpartition('@')[2]} of {variable}"


def is_private(target: str) -> bool:
    """Whether `target` is on this machine. Any host name but localhost may be elsewhere."""
    return _is_unix(target) or all(map(_is_loopback, _addresses(target)))


def _is_here(target: str) -> bool:
    """As `is_private`, but a server's `0.0.0.0` is this machine, too, where the system allows to connect."""
    return is_private(target) or all(_host(address) in ("0.0.0.0", "::") for address in _addresses(target))  # noqa: S104


def _is_unix(target: str) -> bool:
    scheme, colon, _ = target.partition(":")
    return scheme in ("unix", "unix-abstract") and bool(colon)


def _addresses(target: str) -> list[str]:
    """The addresses of ipv4:127.0.0.1:1,127.0.0.2:1, of dns://9.9.9.9/localhost:1, or of host:port."""
    scheme, _, rest = target.partition(":")
    if scheme in ("ipv4", "ipv6", "dns"):
        target = rest.rpartition("/")[2]
    return target.split(",")


def _host(address: str) -> str:
    """The host of `host:port`, `[host]:port` or a host alone."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def _is_loopback(address: str) -> bool:
    host = _host(address)
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_excepted(address: str) -> bool:
    host = _host(address).lower()
    excepted = next((value for name in _EXCEPTIONS if (value := os.environ.get(name))), "")
    for entry in (part.strip().lower() for part in excepted.split(",")):
        if entry and host.endswith(entry):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            pass
    return False
