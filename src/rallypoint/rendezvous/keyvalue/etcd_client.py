"""A thin client of an etcd v3 cluster, over its JSON gateway: what a rendezvous needs, no more.

A try is short and then goes to the next endpoint, because a request that is in flight when etcd's
leader dies hangs for seconds. So a write may have been committed although its answer was lost. A
retried transaction that fails its conditions counts as done if its first key holds its own value.
That is why the first value that a transaction puts must be unique to it. What the keys mean is left
to the callers. One client belongs to one thread.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError, StoreError
from rallypoint.rendezvous.keyvalue.keeper import KeyValueClient, Pair, Snapshot, Transact

TRY_TIMEOUT_S = 0.5
TIMEOUT_S = 10.0
# gRPC: deadline exceeded and unavailable. Another endpoint, or the same a moment later, may answer.
_PASSING_CODES = {4, 14}
_PAUSE_S = 0.02


class EtcdClient(KeyValueClient):
    """Calls whichever of a cluster's endpoints answers."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        try_timeout_s: float = TRY_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._try_timeout_s = try_timeout_s
        self._timeout_s = timeout_s
        self._tls = tls
        self._current = 0
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self, prefix: str) -> Snapshot:
        answer, _ = self._call("read", "kv/range", _under(prefix), prefix)
        return Snapshot(tuple(map(_pair, answer.get("kvs", ()))), _revision(answer))

    def transact(self, request: Transact) -> int | None:
        first, value = next(iter(request.puts.items()))
        leases = {key: request.leases.get(key, request.lease) or "0" for key in request.puts}
        conditions_and_writes: dict[str, object] = {
            "compare": [
                {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(number)}
                for key, number in request.revisions.items()
            ],
            "success": [
                {"request_put": {"key": _b64(key), "value": _b64(each), "lease": leases[key]}}
                for key, each in request.puts.items()
            ]
            + [{"request_delete_range": {"key": _b64(key)}} for key in request.deletes],
            "failure": [{"request_range": {"key": _b64(first)}}],
        }
        answer, retried = self._call("transact", "kv/txn", conditions_and_writes, first)
        if answer.get("succeeded"):
            return _revision(answer)
        found = answer["responses"][0]["response_range"].get("kvs", ())
        if retried and found and _pair(found[0]).value == value:
            return _pair(found[0]).revision
        return None

    def grant(self, ttl_s: int) -> str:
        # A grant whose answer was lost leaves a lease that is never renewed: it expires.
        answer, _ = self._call("grant", "lease/grant", {"TTL": str(ttl_s)})
        return str(answer["ID"])

    def keep_alive(self, lease: str) -> bool:
        answer, _ = self._call("keep_alive", "lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def _call(
        self, operation: str, path: str, request: dict[str, object], key: str | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Return the answer, and whether an earlier try may have been carried out as well."""
        end = time.monotonic() + self._timeout_s
        retried, why = False, ""
        while time.monotonic() < end:
            try:
                answer = self._try(path, json.dumps(request))
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer = {"code": 14, "message": str(error) or type(error).__name__}
            code = answer.get("code", 0)
            if not code:
                return answer, retried
            why = str(answer.get("message") or answer.get("error"))
            if code not in _PASSING_CODES:
                at = endpoint_of(*self._endpoints[self._current])
                text = f"etcd at {at} refused {operation}: {why}"
                raise StoreError(text, endpoint=at, operation=operation, key=key)
            retried = True
            self.close()
            self._current = (self._current + 1) % len(self._endpoints)
            time.sleep(_PAUSE_S)
        names = ", ".join(endpoint_of(*endpoint) for endpoint in self._endpoints)
        raise StoreConnectionError(
            f"no etcd member at {names} answered {operation} within {self._timeout_s:g} s "
            f"({why}); check the endpoints, and that a majority of the cluster's members "
            "is running",
            endpoint=names,
            operation=operation,
            key=key,
        )

    def _try(self, path: str, body: str) -> dict[str, Any]:
        if self._connection is None:
            host, port = self._endpoints[self._current]
            timeout_s, tls = self._try_timeout_s, self._tls
            if tls is None:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            else:
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=timeout_s, context=tls
                )
        self._connection.request("POST", f"/v3/{path}", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        # Such an error may come from a proxy, for instance.
        if response.status != http.client.OK and not answer.get("code"):
            raise ValueError(f"HTTP status {response.status}")
        return answer


def read_tls(configuration: Mapping[str, str]) -> ssl.SSLContext | None:
    """From --rdzv-conf, by torch's names: protocol=https, cacert, cert, key; None: plain http."""
    # torch's two etcd backends have two names for each.
    others = {"ca_cert": "cacert", "ssl_cert": "cert", "ssl_cert_key": "key"}
    configuration = {others.get(name, name): text for name, text in configuration.items()}
    protocol = configuration.get("protocol", "http")
    files = [name for name in ("cacert", "cert", "key") if name in configuration]
    if protocol not in ("http", "https"):
        raise InvalidArgumentError(
            f"--rdzv-conf: protocol is {protocol!r}; it must be http or https."
        )
    if protocol == "http":
        if files:
            raise InvalidArgumentError(
                f"--rdzv-conf: {files[0]} is for https; set protocol=https as well."
            )
        return None
    if "key" in configuration and "cert" not in configuration:
        raise InvalidArgumentError("--rdzv-conf: key needs cert, its certificate.")
    try:
        context = ssl.create_default_context(cafile=configuration.get("cacert"))
        if "cert" in configuration:
            context.load_cert_chain(configuration["cert"], configuration.get("key"))
    except OSError as error:  # ssl's errors are OSErrors
        raise InvalidArgumentError(
            f"--rdzv-conf: {', '.join(files)}: {error.strerror or error}; the files must be in "
            "PEM format."
        ) from None
    return context


def _b64(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _under(prefix: str) -> dict[str, object]:
    # The end is the first key after all that start with the prefix; "/" as the last byte never
    # overflows, which is why a prefix must end so.
    return {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + "0")}


def _pair(kv: dict[str, Any]) -> Pair:
    return Pair(
        base64.b64decode(kv["key"]).decode(),
        base64.b64decode(kv.get("value", "")),
        int(kv["mod_revision"]),
    )


def _revision(answer: dict[str, Any]) -> int:
    return int(answer["header"]["revision"])
