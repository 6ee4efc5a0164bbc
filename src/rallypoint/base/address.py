"""Tells numeric addresses from host names, without a name service."""

from __future__ import annotations

import socket


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`, without looking it up."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def numeric_family(host: str) -> socket.AddressFamily | None:
    """Return the family of a numeric address, None if `host` is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None


def endpoint_of(host: str, port: int) -> str:
    """Return how messages name a server."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
