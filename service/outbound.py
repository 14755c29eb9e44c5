"""Connections to other servers over HTTP: which are on this machine, and the proxy to those that are not.

Libraries take the proxy from the environment, and use it for loopback addresses, too. Such a request would
leave this machine, and without TLS, which it does not need here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib import request
from urllib.parse import urlsplit


def is_this_machine(host: str) -> bool:
    """Whether a host of a URL is surely this machine. Any name but localhost may be elsewhere."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy of the environment.

    Attributes:
        variable: Which names it, without regard to case.
        address: Where it is, without the credentials that the variable may contain. Empty: it is no URL.
    """

    variable: str
    address: str


def proxy_of(url: str) -> Proxy | None:
    """The proxy of an HTTP client for a URL, for messages. None: there is none."""
    parts, proxies = urlsplit(url), request.getproxies_environment()
    host = parts.hostname or ""
    scheme = next((scheme for scheme in (parts.scheme, "all") if proxies.get(scheme)), "")
    # The stubs of the standard library lack this function.
    is_excepted = request.proxy_bypass_environment(host, proxies)  # type: ignore[attr-defined]
    if not scheme or is_this_machine(host) or is_excepted:
        return None
    found = proxies[scheme]
    try:
        address = urlsplit(found if "://" in found else f"//{found}").netloc.rpartition("@")[2]
    except ValueError:
        address = ""
    return Proxy(f"{scheme}_proxy", address)
