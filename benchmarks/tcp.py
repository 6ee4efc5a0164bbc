"""Our TCP transport against PyTorch's gloo and iperf3: all_reduce between hosts, and on loopback.

    python benchmarks/tcp.py [--hosts 2] [--mbit 1000] [--repeats 5] [--sizes 8 1024 ...]

With --hosts 0 the ranks are on this machine's loopback; else each is on a test host of its own (a
network namespace; needs root or user namespaces), whose links --mbit slows down. float32, SUM, in
place. Each row is the median over repeats of the mean time of a batch of calls on rank 0, the order
alternating. "bus" is bus bandwidth, 2 (n - 1) / n bytes for each byte of the array, in Gbit/s;
iperf3 --bidir is what each direction of one link carries, measured before and after.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from all_reduce import batch_us, calls_for
from table import human_bytes, need, print_table, save

import rallypoint as dist
from rallypoint.testing.hosts import Hosts, why_not

SIZES = [8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
PORT = "29533"


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("tcp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch: Any = None
    if need("torch", "gloo cannot be measured (pip install torch==2.13.0)"):
        import torch

        os.environ["MASTER_PORT"] = str(int(PORT) + 1)
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
    rows = []
    for nbytes in options.sizes:
        array = np.full(nbytes // 4, rank + 1, np.float32)
        total = ranks * (ranks + 1) / 2
        dist.all_reduce(array)
        assert (array == total).all(), "rallypoint: wrong sum"
        array[...] = 0
        contenders: dict[str, Callable[[], Any]] = {
            "rallypoint": lambda a=array: dist.all_reduce(a)
        }
        if torch is not None:
            tensor = torch.zeros(nbytes // 4, dtype=torch.float32)
            contenders["gloo"] = lambda t=tensor: torch.distributed.all_reduce(t)
        calls = {name: calls_for(call) for name, call in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(options.repeats):
            order = list(contenders) if repeat % 2 == 0 else list(reversed(contenders))
            for name in order:
                times[name].append(batch_us(contenders[name], calls[name]))
        row: dict[str, Any] = {"bytes": nbytes, "ranks": ranks}
        for name, values in times.items():
            row[f"{name}_us"] = statistics.median(values)
            row[f"{name}_best_us"] = min(values)
        rows.append(row)
    if rank == 0:
        Path(os.environ["BENCHMARK_OUTPUT"]).write_text(json.dumps(rows))
    dist.destroy_process_group()


def iperf_gbit(hosts: Hosts) -> float | None:
    """What each direction of the link between the first two hosts carries, both in use."""
    if shutil.which("iperf3") is None:
        return None
    words = ["iperf3", "-c", hosts[1].address, "--bidir", "-t", "3", "-J"]
    for _ in range(50):  # until the server listens
        client = subprocess.run(
            hosts[2].enter(*words), capture_output=True, text=True, timeout=30, check=False
        )
        end = json.loads(client.stdout).get("end", {}) if client.returncode == 0 else {}
        if "sum_received" in end and "sum_received_bidir_reverse" in end:
            there, back = end["sum_received"], end["sum_received_bidir_reverse"]
            return min(there["bits_per_second"], back["bits_per_second"]) / 1e9
    return None


def shape(hosts: Hosts, mbit: int) -> None:
    """Let no more than that into and out of each host."""
    for host in hosts.hosts:
        queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms"]
        host.run("tc", "qdisc", "add", "dev", "eth0", *queue)
        hosts.switch.run("tc", "qdisc", "add", "dev", f"port{host.number}", *queue)


def run_workers(options: argparse.Namespace, output: Path, hosts: Hosts | None) -> None:
    ranks = options.hosts or options.ranks
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": hosts[1].address if hosts else "127.0.0.1",
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
            "OMP_NUM_THREADS": "1",
            "BENCHMARK_OUTPUT": str(output),
        }
        command = [sys.executable, __file__, "--worker", "--repeats", str(options.repeats)]
        command += ["--sizes", *map(str, options.sizes)]
        if hosts:
            processes.append(hosts[rank + 1].popen(command, env=env))
        else:
            processes.append(subprocess.Popen(command, env=env))
    if sum(process.wait() != 0 for process in processes):
        sys.exit("a worker failed")


def report(options: argparse.Namespace, rows: list[dict[str, Any]], rates: list[float]) -> None:
    rate = statistics.mean(rates) if rates else None
    printed = []
    for row in rows:
        share = 2 * (row["ranks"] - 1) / row["ranks"]
        cells = [human_bytes(row["bytes"])]
        for name in ("rallypoint", "gloo"):
            us = row.get(f"{name}_us")
            if us is None:
                cells += ["-", "-"]
                continue
            row[f"{name}_bus_gbit"] = row["bytes"] * share * 8 / us / 1e3
            cells += [f"{us:.1f}", f"{row[f'{name}_bus_gbit']:.3f}"]
        gloo = row.get("gloo_us")
        cells.append(f"{gloo / row['rallypoint_us']:.2f}" if gloo else "-")
        cells.append(f"{row['rallypoint_bus_gbit'] / rate:.2f}" if rate else "-")
        printed.append(cells)
        row.update(hosts=options.hosts, mbit=options.mbit, iperf3_gbit=rate)
    where = f"{options.hosts} hosts" if options.hosts else f"{options.ranks} ranks on loopback"
    limit = f", {options.mbit} Mbit/s" if options.mbit else ""
    print(f"{where}{limit}" + (f"; iperf3 --bidir: {rate:.3f} Gbit/s each way" if rate else ""))
    columns = ["size", "ours us", "bus", "gloo us", "bus", "gloo / ours", "ours / iperf3"]
    print_table(columns, printed)
    name = f"hosts{options.hosts}" if options.hosts else f"loopback{options.ranks}"
    save(f"tcp_{name}" + (f"_{options.mbit}mbit" if options.mbit else ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on loopback")
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts must not stay
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "rows.json"
        if options.hosts == 0:
            run_workers(options, output, None)
            return report(options, json.loads(output.read_text()), [])
        if why := why_not():
            sys.exit(why)
        with Hosts(options.hosts) as hosts:
            if options.mbit:
                shape(hosts, options.mbit)
            if shutil.which("iperf3"):  # its server ends with the hosts
                hosts[1].popen(["iperf3", "-s"], stdout=subprocess.DEVNULL)
            rates = [iperf_gbit(hosts)]
            run_workers(options, output, hosts)
            rates.append(iperf_gbit(hosts))
            report(options, json.loads(output.read_text()), [rate for rate in rates if rate])
    return None


if __name__ == "__main__":
    main()
