"""Hosts in a network: `rallypoint bench --hosts` on test hosts, beside what iperf3 shows there.

    python benchmarks/tcp.py [--hosts 4] [--mbit 1000] [--vs gloo,openmpi] [--operation all_reduce]

Each rank is on a test host of its own (a network namespace; needs root or user namespaces), or
--ranks of them, and --mbit slows the hosts' links down. "bus" is bus bandwidth in Gbit/s, as
nccl-tests have it: what each host has to send, and to receive, in an all_reduce that does with the
least. iperf3, before and after, in Gbit/s in each direction:

    one link   --bidir between the first two hosts, while the others rest
    all        --bidir between all pairs at once: the sum of a host's links, on average

iperf3 uses Reno where the machine uses BBR, as ours does, for BBR is slow on such links;
--congestion sets what all hosts use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from table import human_bytes, print_table, save

from hosts import Hosts, RemoteShell, why_not

# The hosts are one machine, where MPIs would tie each host's first rank to the same core, and spin.
SHARE = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "I_MPI_PIN": "off",
}
SIZES = "8,1K,16K,256K,1M,4M,16M,64M"
FIRST_PORT = 5201


def shape(hosts: Hosts, mbit: int) -> None:
    """Limit the rate of each host in both directions."""
    for host in hosts.hosts:
        queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms"]
        host.run("tc", "qdisc", "add", "dev", "eth0", *queue)
        hosts.switch.run("tc", "qdisc", "add", "dev", f"port{host.number}", *queue)


def use(hosts: Hosts, congestion: str) -> None:
    """Have all programs that do not choose for themselves use this congestion control."""
    for host in hosts.hosts:
        host.run("sh", "-c", f"echo {congestion} >/proc/sys/net/ipv4/tcp_congestion_control")


class Iperf:
    """iperf3's servers, one for each pair of hosts; they end with the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        usual = hosts[1].run("cat", "/proc/sys/net/ipv4/tcp_congestion_control")
        self._choice = ["--congestion", "reno"] if usual.startswith("bbr") else []
        numbers = range(1, len(hosts.hosts) + 1)
        self._pairs = {pair: FIRST_PORT + i for i, pair in enumerate(combinations(numbers, 2))}
        for (server, _), port in self._pairs.items():
            command = ["iperf3", "-s", "-p", str(port), "--forceflush"]
            out = hosts[server].popen(command, stdout=subprocess.PIPE).stdout
            assert out is not None
            while b"listening" not in out.readline():
                pass

    def gbit(self, *, all_links: bool) -> float:
        """What a host sends and what it receives, on average."""
        pairs = list(self._pairs)[: None if all_links else 1]
        clients = [self._client(*pair, self._pairs[pair]) for pair in pairs]
        ends = [json.loads(client.communicate()[0])["end"] for client in clients]
        bits: float = sum(
            end[way]["bits_per_second"]
            for end in ends
            for way in ("sum_received", "sum_received_bidir_reverse")
        )
        return bits / 1e9 / len({number for pair in pairs for number in pair})

    def _client(self, server: int, client: int, port: int) -> subprocess.Popen[bytes]:
        command = ["iperf3", "-c", self._hosts[server].address, "-p", str(port)]
        command += ["--bidir", "-t", "3", "-J", *self._choice]
        return self._hosts[client].popen(command, stdout=subprocess.PIPE)


def bench(options: argparse.Namespace, hosts: Hosts, directory: Path) -> dict[str, Any]:
    """What `rallypoint bench` found."""
    found = directory / "found.json"
    with RemoteShell(hosts, directory) as shell:
        words = ["rallypoint", "bench", options.operation, "--rsh", " ".join(shell.command)]
        words += ["--hosts", ",".join(host.name for host in hosts.hosts)]
        words += ["--nproc-per-node", str(options.ranks), "--sizes", options.sizes]
        words += ["--rounds", str(options.rounds), "--json", str(found), "--vs", options.vs]
        words += ["--algorithm", options.algorithm] if options.algorithm else []
        subprocess.run([sys.executable, "-m", *words], check=True, env={**os.environ, **SHARE})
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def report(options: argparse.Namespace, found: dict[str, Any], rates: dict[str, float]) -> None:
    peers = [name for name in found["contenders"] if name != "rallypoint"]
    rows, printed = [], []
    for row in found["rows"]:
        results = row["results"]
        ours = results["rallypoint"]
        bus = (ours["busbw_gb_s"] or 0) * 8
        times = {name: results[name]["time_us"] for name in ("rallypoint", *peers)}
        known = [time for name, time in times.items() if name != "rallypoint" and time]
        cells = [human_bytes(row["bytes"]), f"{times['rallypoint']:.1f}", f"{bus:.2f}"]
        cells += [f"{rate and bus / rate:.0%}" for rate in rates.values()]
        cells += [f"{times[name]:.1f}" if times[name] else "-" for name in peers]
        cells.append(f"{min(known) / times['rallypoint']:.2f}" if known else "-")
        printed.append(cells)
        rows.append({"bytes": row["bytes"], "times_us": times, "bus_gbit": bus, **rates})
    limit = f", {options.mbit} Mbit/s" if options.mbit else ""
    told = "; ".join(f"{name}: {rate:.2f} Gbit/s" for name, rate in rates.items())
    print(f"{options.operation}, {options.hosts} hosts of {options.ranks}{limit}; {told}")
    columns = ["size", "us", "bus", *(f"of {name}" for name in rates), *peers, "ahead"]
    print_table(columns, printed)
    shape_of = f"hosts{options.hosts}x{options.ranks}" + (f"_{options.mbit}mbit" * bool(limit))
    save(f"tcp_{options.operation}_{shape_of}", rows)


def measured(iperf: Iperf, hosts: int) -> dict[str, float]:
    kinds = {"one link": False, "all": True} if hosts > 2 else {"one link": False}
    return {f"iperf3, {name}": iperf.gbit(all_links=each) for name, each in kinds.items()}


def means(several: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(each[name] for each in several) for name in several[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operation", default="all_reduce")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--congestion", default="", help="as reno; default: the machine's")
    parser.add_argument("--vs", default="gloo,openmpi")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--algorithm", default="")
    parser.add_argument("--no-iperf", action="store_true")
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts must not stay
    with tempfile.TemporaryDirectory() as directory, Hosts(options.hosts) as hosts:
        if options.mbit:
            shape(hosts, options.mbit)
        if options.congestion:
            use(hosts, options.congestion)
        rates: list[dict[str, float]] = [{}]
        iperf = None
        if shutil.which("iperf3") and not options.no_iperf:
            iperf = Iperf(hosts)
            rates = [measured(iperf, options.hosts)]
        found = bench(options, hosts, Path(directory))
        if iperf is not None:
            rates.append(measured(iperf, options.hosts))
        report(options, found, means(rates))


if __name__ == "__main__":
    main()
