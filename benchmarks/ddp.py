"""DistributedDataParallel on CPUs with our backend and with gloo: what a step costs beside compute.

    python benchmarks/ddp.py [--nproc-per-node 2] [--steps 5] [--repeats 5] [--models cnn ...]

Three models: a small CNN, and transformers of about 10 and 50 million parameters. Each worker has
one thread. A step is forward, backward and SGD on a fixed batch. The same step without
synchronisation (`no_sync`) is its compute; what is left is the time spent outside compute. "hook"
is our backend with `rallypoint.pytorch.ddp_comm_hook`, without which DDP divides all gradients
itself. Contenders take turns in the same processes; figures are medians over repeats of the mean of
some steps, on rank 0. The first rows are torch.distributed.all_reduce of 8 bytes, and of a bucket
of 25 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from table import need, print_table, save
from workers import answer, is_worker, measured_by

BACKENDS = ("rallypoint", "gloo")
MODELS = ("cnn", "transformer 10M", "transformer 50M")
# Or else freed memory goes back to the system and comes back page by page in the next step: now and
# then, and for longer than what is measured.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
CALLS = {"all_reduce 8 B": (2, 2000), "all_reduce 25 MB": (6_250_000, 5)}  # items, calls


def cnn() -> tuple[Any, Any]:
    import torch
    from torch import nn

    layers = nn.Sequential(
        *[nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)],
    )
    return layers, torch.randn(16, 1, 28, 28)


def transformer(width: int, depth: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        width, 8, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.randn(
        1, 16, width
    )


def built(name: str) -> tuple[Any, Any]:
    """A model and its batch."""
    import torch

    torch.manual_seed(0)
    if name == "cnn":
        return cnn()
    return transformer(320, 8) if name == "transformer 10M" else transformer(640, 10)


def stepper(
    name: str,
    group: Any,  # noqa: ANN401 - of torch
    *,
    hooked: bool = False,
) -> tuple[Callable[[bool], None], int]:
    """A function that takes a step, with or without synchronisation; and how many parameters."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model, batch = built(name)
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if hooked:
        from rallypoint.pytorch import ddp_comm_hook

        wrapped.register_comm_hook((group, None), ddp_comm_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

    def step(synchronised: bool) -> None:
        with contextlib.nullcontext() if synchronised else wrapped.no_sync():
            wrapped(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, sum(parameter.numel() for parameter in model.parameters())


def mean_s(call: Callable[[], object], calls: int, groups: dict[str, Any]) -> float:
    """Of a call, all ranks beginning together."""
    import torch.distributed as dist

    dist.barrier(group=groups["rallypoint"])
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def worker(models: list[str], steps: int, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("rallypoint")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows: list[dict[str, Any]] = []

    def measure(what: str, contenders: dict[str, Callable[[], object]], calls: int) -> None:
        for call in contenders.values():
            for _ in range(2):
                call()
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(repeats):
            for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(mean_s(contenders[name], calls, groups))
        medians = {name: statistics.median(each) for name, each in times.items()}
        rows.append({"what": what, **medians})

    for what, (items, calls) in CALLS.items():
        tensor = torch.zeros(items)
        measure(
            what,
            {
                backend: partial(dist.all_reduce, tensor, group=group)
                for backend, group in groups.items()
            },
            calls,
        )
    for name in models:
        ours, parameters = stepper(name, groups["rallypoint"])
        hooked, _ = stepper(name, groups["rallypoint"], hooked=True)
        gloos, _ = stepper(name, groups["gloo"])
        measure(
            f"{name} ({parameters / 1e6:.1f} M)",
            {
                "rallypoint": partial(ours, True),
                "hook": partial(hooked, True),
                "gloo": partial(gloos, True),
                "compute": partial(ours, False),
            },
            steps,
        )
    if dist.get_rank() == 0:
        answer(rows)
    dist.destroy_process_group()


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    steps = "compute" in row
    outside = row.get("outside", {})
    return [
        row["what"],
        f"{row['rallypoint'] * 1e3:.4g}",
        f"{row['hook'] * 1e3:.4g}" if steps else "",
        f"{row['gloo'] * 1e3:.4g}",
        f"{row['gloo'] / row['rallypoint']:.2f}",
        f"{row['compute'] * 1e3:.4g}" if steps else "",
        *(
            f"{outside[each] / outside['gloo']:.2f}" if steps else ""
            for each in ("rallypoint", "hook")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    if is_worker():
        worker(options.models, options.steps, options.repeats)
        return
    if not need("torch", "this is about its DistributedDataParallel"):
        return
    rows = measured_by(options.nproc_per_node, OMP_NUM_THREADS="1", **KEEPS_MEMORY)
    for row in rows:
        row["ranks"] = options.nproc_per_node
        if "compute" in row:
            row["outside"] = {each: row[each] - row["compute"] for each in (*BACKENDS, "hook")}
    columns = ["", "ours ms", "hook ms", "gloo ms", "gloo/ours", "compute ms", "outside", "hook's"]
    print_table(columns, [cells(row) for row in rows])
    print("outside: the time outside compute, as a part of gloo's")
    save(f"ddp_{options.nproc_per_node}", rows)


if __name__ == "__main__":
    main()
