"""Starts contenders on several hosts, with one connection to each, made by ssh.

    rallypoint bench  --ssh-->  host.py on host 0   -> a crew for each contender
                      --ssh-->  host.py on host 1   -> a crew for each contender

Orders and answers go over standard input and output of the ssh process, so no port is opened and
no one else can connect. When this process ends, however it ends, so do they.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.cluster.remote_shell import ShellLink, command_on, forwarded, version_trouble
from rallypoint.lab.bench.crew import ANSWER_S, START_S, CrewError, check_ranks, new_address
from rallypoint.lab.bench.host import GREETING

_GET_S = 600.0  # for installing MPIs
_LEAVE_S = 20.0
_GRACE_S = 15.0  # for the other hosts' answers, once one has failed
# Variables that users set here and mean for all hosts.
_FORWARDED = ("RALLYPOINT_", "GLOO_", "NCCL_", "OMP_", "OMPI_", "PRTE_", "PMIX_", "UCX_", "MPICH_",
              "I_MPI_", "FI_")  # fmt: skip
_MODULE = "rallypoint.lab.bench.host"


class FarCrew:
    """The processes of one contender on all hosts."""

    def __init__(self, hosts: ContenderHosts, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._hosts = hosts

    def ask(self, order: Mapping[str, object]) -> list[dict[str, Any]]:
        """Send an order to all at once; returns their answers."""
        found = self._hosts.order("ask", ANSWER_S + _GRACE_S, crew=self.name, order=order)
        return [answer for each in found for answer in each["answers"]]

    def end(self) -> None:
        """See to it that all are gone."""
        self._hosts.order("end", 2 * _LEAVE_S, crew=self.name)


class ContenderHosts:
    """Starts contenders on several hosts.

    Args:
        names: what the hosts call each other; may begin with `user@`.
        rsh: a command that starts another on a host; the host's name is appended to it, or replaces
            ``{host}``.
        ranks: on each host.
        begin: how to find contenders there.
    """

    def __init__(
        self, names: Sequence[str], rsh: Sequence[str], *, ranks: int, begin: Mapping[str, object]
    ) -> None:
        self._names = [name.rpartition("@")[2] for name in names]
        self._rsh = list(rsh)
        self._links: list[ShellLink] = []
        try:
            for name in names:
                self._links.append(ShellLink(name, command_on(name, rsh, _MODULE)))
            for link in self._links:
                link.greet(GREETING)
            self._check_versions()
            self.order("begin", _GET_S, environ=_environ(), ranks=ranks, **begin)
        except BaseException:
            self.close()
            raise

    def start(self, name: str, begin: Mapping[str, object]) -> FarCrew:
        """Start the processes of a contender."""
        address = new_address()
        port = self.order("open", ANSWER_S, crew=name, address=address)[0]["port"]
        common = {"crew": name, "address": address, "hosts": self._names, "port": port}
        common |= {"rsh": self._rsh, "begin": begin}
        orders = [{**common, "node": node} for node in range(len(self._links))]
        found = self._order("start", START_S + ANSWER_S, orders)
        answers = [answer for each in found for answer in each["answers"]]
        check_ranks(name, answers)
        return FarCrew(self, name, answers[0]["version"])

    def describe(self) -> str:
        """The hosts, in a few words."""
        kinds = {f"{link.found['cpu']}, {link.found['cores']} cores" for link in self._links}
        return f"{', '.join(self._names)}: {'; '.join(sorted(kinds))}"

    def load(self) -> str:
        """Empty: the hosts are not asked between rows."""
        return ""

    def order(self, do: str, wait_s: float, **what: object) -> list[dict[str, Any]]:
        """Send an order to all hosts at once; returns their answers."""
        return self._order(do, wait_s, [what] * len(self._links))

    def close(self) -> None:
        """End everything that was started, there and here."""
        for link in self._links:
            link.close()
        until = time.monotonic() + _LEAVE_S
        for link in self._links:
            link.end(until)

    def _order(
        self, do: str, wait_s: float, orders: Sequence[Mapping[str, object]]
    ) -> list[dict[str, Any]]:
        for link, order in zip(self._links, orders, strict=True):
            link.tell({"do": do, **order})
        return self._answers(wait_s)

    def _answers(self, wait_s: float) -> list[dict[str, Any]]:
        """The answers of all hosts; raises the first failure, but only after the others have
        answered.
        """
        until = time.monotonic() + wait_s
        answers: dict[ShellLink, dict[str, Any]] = {}
        failed = ""
        while silent := [link for link in self._links if link not in answers]:
            left_s = max(0.0, until - time.monotonic())
            ready, _, _ = select.select(silent, [], [], left_s)
            if not ready:
                names = ", ".join(link.name for link in silent)
                raise HostError(failed or f"{names}: no answer within {wait_s:g} s")
            for link in ready:
                answers[link] = link.read()
                if "error" in answers[link] and not failed:
                    failed = f"{link.name}: {answers[link]['error']}"
                    until = min(until, time.monotonic() + _GRACE_S)
        if failed:
            raise CrewError(failed)
        return [answers[link] for link in self._links]

    def _check_versions(self) -> None:
        for link in self._links:
            trouble = version_trouble(link.found)
            if trouble:
                raise HostError(f"{link.name}: {trouble}")


def _environ() -> dict[str, str]:
    """The variables that all processes get: those that users set, and a token that keeps strangers
    out.
    """
    return {"RALLYPOINT_TOKEN": secrets.token_hex(16), **forwarded(os.environ, _FORWARDED)}
