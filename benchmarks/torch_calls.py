"""What a small call of torch.distributed costs with our backend and with gloo, of every collective.

    python benchmarks/torch_calls.py [--nproc-per-node 2] [--items 2] [--repeats 9] [--calls 1000]

Tensors are float32, 8 bytes unless asked otherwise; of calls that take one tensor for all ranks, or
a list, that is the size of each rank's part. "sync" is the call alone, "async" the call with
`async_op=True` and the wait for its work. Contenders take turns in the same processes; figures are
medians over repeats of the mean of some calls, on rank 0. The least, beside it, is what the call
costs where nothing else runs. gloo makes a tenth of the calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from table import need, print_table, save
from workers import answer, is_worker, measured_by

BACKENDS = ("rallypoint", "gloo")
MODES = ("sync", "async")


def calls_of(group: Any, items: int) -> dict[str, Callable[[bool], Any]]:  # noqa: ANN401 - of torch
    """Each collective: a function that takes `async_op`, and returns a work if that is true."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    one, other = torch.ones(items), torch.ones(items)
    whole, whole_too = torch.ones(ranks * items), torch.ones(ranks * items)
    many = [torch.ones(items) for _ in range(ranks)]
    many_too = [torch.ones(items) for _ in range(ranks)]
    at_root = {True: many, False: None}[rank == 0]

    def exchange(is_async: bool) -> Any:  # noqa: ANN401 - of torch
        """A message around: a round trip between two ranks."""
        if not is_async:
            if rank % 2 == 0:
                dist.send(one, (rank + 1) % ranks, group=group)
                dist.recv(other, (rank - 1) % ranks, group=group)
            else:
                dist.recv(other, (rank - 1) % ranks, group=group)
                dist.send(one, (rank + 1) % ranks, group=group)
            return None
        received = dist.irecv(other, (rank - 1) % ranks, group=group)
        dist.isend(one, (rank + 1) % ranks, group=group).wait()
        return received

    return {
        "all_reduce": lambda a: dist.all_reduce(one, group=group, async_op=a),
        "broadcast": lambda a: dist.broadcast(one, 0, group=group, async_op=a),
        "reduce": lambda a: dist.reduce(one, 0, group=group, async_op=a),
        "all_gather": lambda a: dist.all_gather(many, one, group=group, async_op=a),
        "all_gather_into_tensor": lambda a: dist.all_gather_into_tensor(
            whole, one, group=group, async_op=a
        ),
        "gather": lambda a: dist.gather(one, at_root, 0, group=group, async_op=a),
        "scatter": lambda a: dist.scatter(one, at_root, 0, group=group, async_op=a),
        "reduce_scatter": lambda a: dist.reduce_scatter(one, many, group=group, async_op=a),
        "reduce_scatter_tensor": lambda a: dist.reduce_scatter_tensor(
            one, whole, group=group, async_op=a
        ),
        "all_to_all": lambda a: dist.all_to_all(many_too, many, group=group, async_op=a),
        "all_to_all_single": lambda a: dist.all_to_all_single(
            whole_too, whole, group=group, async_op=a
        ),
        "barrier": lambda a: dist.barrier(group, async_op=a),
        "send and recv": exchange,
    }


def mean_us(call: Callable[[bool], Any], calls: int, mode: str) -> float:
    """Of a call, all ranks beginning together."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    if mode == "sync":
        for _ in range(calls):
            call(False)
    else:
        for _ in range(calls):
            call(True).wait()
    return (time.perf_counter() - begin) / calls * 1e6


def worker(items: int, repeats: int, calls: int, only: list[str]) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # names of old that torch deprecates
    torch.set_num_threads(1)
    dist.init_process_group("rallypoint")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    contenders = {backend: calls_of(group, items) for backend, group in groups.items()}
    rows: list[dict[str, Any]] = []
    for what in contenders["gloo"]:
        if only and what not in only:
            continue
        times: dict[tuple[str, str], list[float]] = {(b, m): [] for b in BACKENDS for m in MODES}
        for turn in range(repeats + 1):
            for backend, mode in list(times)[:: 1 if turn % 2 == 0 else -1]:
                count = calls if backend == "rallypoint" else calls // 10
                took = mean_us(contenders[backend][what], count if turn else 10, mode)
                if turn:  # the first one warms up
                    times[backend, mode].append(took)
        row: dict[str, Any] = {"what": what, "torch": torch.__version__}
        for (backend, mode), each in times.items():
            row[f"{backend} {mode}"] = statistics.median(each)
            row[f"{backend} {mode} least"] = min(each)
        rows.append(row)
    if dist.get_rank() == 0:
        answer(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--items", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if is_worker():
        worker(options.items, options.repeats, options.calls, options.only)
        return
    if not need("torch", "this is about its calls"):
        return
    rows = measured_by(options.nproc_per_node, OMP_NUM_THREADS="1")
    columns = [f"torch {rows[0]['torch']}, us"]
    for mode in MODES:
        columns += [f"{mode} ours", "least", f"{mode} gloo", "gloo/ours"]
    lines = []
    for row in rows:
        line = [row["what"]]
        for mode in MODES:
            ours, gloos = row[f"rallypoint {mode}"], row[f"gloo {mode}"]
            least = row[f"rallypoint {mode} least"]
            line += [f"{ours:.1f}", f"{least:.1f}", f"{gloos:.0f}", f"{gloos / ours:.0f}"]
        lines.append(line)
    print_table(columns, lines)
    save(f"torch_calls_{options.nproc_per_node}_{rows[0]['torch']}", rows)


if __name__ == "__main__":
    main()
