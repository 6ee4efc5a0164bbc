"""The environment variables that the checks read. Secrets and passwords are not among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
KNOWN = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_BLOCKING_WAIT",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "RALLYPOINT_SOCKET_IFNAME",
    "TORCH_NCCL_BLOCKING_WAIT",
)


def look_at_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that are set, by the names that must be unset to be rid of them."""
    found = {name: environ[name] for name in KNOWN if environ.get(name)}
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        if text := environ.get(name):
            found[name] = _without_password(text)
    return found


def proxy_bypasses(environ: Mapping[str, str], hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts that no_proxy names, themselves or by their domain."""
    text = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [word.strip().lower().lstrip(".") for word in text.split(",") if word.strip()]

    def is_named(host: str) -> bool:
        return any(
            name in ("*", host.lower()) or host.lower().endswith(f".{name}") for name in names
        )

    return tuple(host for host in hosts if is_named(host))


def _without_password(text: str) -> str:
    """The proxy without its user and password; both "http://me:secret@proxy" and "me:secret@proxy"
    are usual.
    """
    before, at, rest = text.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme + separator if separator else ''}***@{rest}" if at else text
