"""Ranks that share a GPU: all_reduce of its tensors, steps of DistributedDataParallel, new weights.

    python benchmarks/shared_gpu.py [--nproc-per-node 2] [--sizes 8 65536 ...] [--device cuda]
    python benchmarks/shared_gpu.py --what weights [--weights 10000000000]
    python benchmarks/shared_gpu.py --what copies

NCCL takes one rank per GPU. Our backend works in the GPU's memory (RALLYPOINT_DEVICE_MEMORY=1);
"staged" is ours through the host's, as gloo is. "copies" is what a GPU's two copies of the
tensor cost, to pinned memory and back, without anything between them. "elastic" is
`rallypoint.pytorch.elastic.DistributedDataParallel`, whose step also agrees on the update; "alone"
is the step without synchronisation. A call ends when the device has the result. Contenders take
turns in the same processes; figures are medians, on rank 0.

"weights" are those of a transformer in 16 bits, which rank 0 gives the others, after a pause in
which mappings of other ranks' memory are closed, as between the updates of a training. They lie
in a few flat buffers ("flat"), or are sent in buckets as by examples/new_weights_torch.py, or one
by one. The aim is 15 ms for 10 GB, where the memory of an H100 needs 8.

"copies" shows why a tensor of 8 B costs more than one of 64 KiB by way of the host: each of the two
copies, with all ranks at once ("all"), which share the GPU by turns, and on rank 0 alone. If the
turns are the reason, rank 0 alone pays for neither; from some size on, copies take no turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ddp import built
from table import human_bytes, need, print_table, save
from workers import answer, is_worker, measured_by

sys.path.append(str(Path(__file__).parents[1] / "examples"))

WAYS = ("rallypoint", "staged", "gloo")
SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 128 << 20]
MODELS = ("transformer 10M", "transformer 50M")
PARTS = ("all_reduce", "steps", "weights", "copies")
_BLOCK_S = 0.1
_PAUSE_S = 1.5  # longer than mappings stay open
_AIM_S_PER_BYTE = 15e-3 / 10e9
_FLAT_BYTES = 1 << 30
_COPIED = [8, 512, 4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 1 << 20]  # bytes


class Worker:
    """The measurements of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import rallypoint

        dist.init_process_group("rallypoint")
        rallypoint.init_process_group()  # what the elastic one reduces over
        self._options = options
        self._groups = {}
        for way in WAYS:
            # Groups read it when they form.
            os.environ["RALLYPOINT_DEVICE_MEMORY"] = "0" if way == "staged" else "1"
            self._groups[way] = dist.new_group(backend="gloo" if way == "gloo" else "rallypoint")
        self._is_gpu = options.device == "cuda"
        self._own = torch.device(options.device, 0 if self._is_gpu else None)
        self._rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure everything; one rank answers."""
        import torch.distributed as dist

        parts = self._options.what
        for nbytes in self._options.sizes if "all_reduce" in parts else ():
            self._measure(human_bytes(nbytes), self._reductions(nbytes))
        for name in MODELS if "steps" in parts else ():
            self._measure(name, self._steps(name))
        if "weights" in parts:
            self._updates(self._options.weights)
        for nbytes in _COPIED if "copies" in parts else ():
            self._measure(f"copy of {human_bytes(nbytes)}", self._copies(nbytes))
        if dist.get_rank() == 0:
            answer(self._rows)
        dist.destroy_process_group()

    def _reductions(self, nbytes: int) -> dict[str, Callable[[], object]]:
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(nbytes // 4, device=self._own)
        here = torch.zeros(nbytes // 4, pin_memory=self._is_gpu)

        def copies() -> None:
            here.copy_(tensor)
            tensor.copy_(here)

        def reduction(group: object) -> Callable[[], object]:
            return lambda: dist.all_reduce(tensor, group=group)

        return {name: reduction(group) for name, group in self._groups.items()} | {"copies": copies}

    def _steps(self, name: str) -> dict[str, Callable[[], object]]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from rallypoint import elastic
        from rallypoint.pytorch.elastic import DistributedDataParallel as Elastic

        def step(model: Any, update: Callable[[], Any] | None = None) -> Callable[[], object]:  # noqa: ANN401
            batch = built(name)[1].to(self._own)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

            def take() -> None:
                optimizer.zero_grad(set_to_none=False)
                model(batch).square().mean().backward()
                if update is None:
                    optimizer.step()
                    return
                with update():
                    optimizer.step()

            return take

        def model() -> Any:  # noqa: ANN401 - of torch
            return built(name)[0].to(self._own)

        found = {
            backend: step(DistributedDataParallel(model(), process_group=group))
            for backend, group in self._groups.items()
        }
        elastic_one = Elastic(model())
        state = elastic.State(model=elastic_one)
        state.sync()
        return {**found, "elastic": step(elastic_one, state.update), "alone": step(model())}

    def _copies(self, nbytes: int) -> dict[str, Callable[[], object]]:
        import torch
        import torch.distributed as dist

        there = torch.zeros(nbytes, dtype=torch.uint8, device=self._own)
        here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._is_gpu)
        is_first = dist.get_rank() == 0
        return {
            "all to host": lambda: here.copy_(there),
            "all to GPU": lambda: there.copy_(here),
            "one to host": lambda: is_first and here.copy_(there),
            "one to GPU": lambda: is_first and there.copy_(here),
        }

    def _updates(self, nbytes: int) -> None:
        """Measure how long rank 0's weights take to all ranks."""
        import torch
        import torch.distributed as dist
        from new_weights_torch import update
        from torch._utils import _unflatten_dense_tensors

        flat, loose = [], []
        for shapes in _shapes_of_weights(nbytes):
            count, value = sum(each.numel() for each in shapes), float(dist.get_rank() == 0)
            flat.append(torch.full((count,), value, dtype=torch.bfloat16, device=self._own))
            loose += [each.clone() for each in _unflatten_dense_tensors(flat[-1], shapes)]

        def one_by_one(tensors: list[Any], group: object) -> None:
            for each in tensors:
                dist.broadcast(each, 0, group=group)

        ours = {WAYS[0]: self._groups[WAYS[0]]}
        for what, function, tensors, groups in (
            ("flat", one_by_one, flat, self._groups),
            ("in buckets", update, loose, ours),
            ("one by one", one_by_one, loose, ours),
        ):
            row: dict[str, Any] = {"what": f"weights {what}"}
            for way, group in groups.items():
                times = []
                for _ in range(1 + self._options.repeats):  # the first one forms the group
                    time.sleep(_PAUSE_S)
                    times.append(self._mean_s(partial(function, tensors, group), 1))
                row[way] = statistics.median(times[1:]) * 1e6
            assert all(bool((each == 1).all()) for each in tensors), what
            self._rows.append({**row, "aim": nbytes * _AIM_S_PER_BYTE * 1e6})

    def _measure(self, what: str, contenders: dict[str, Callable[[], object]]) -> None:
        counts = {name: self._count(call) for name, call in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(self._options.repeats):
            for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(self._mean_s(contenders[name], counts[name]))
        medians = {name: statistics.median(each) * 1e6 for name, each in times.items()}
        self._rows.append({"what": what, **medians})

    def _count(self, call: Callable[[], object]) -> int:
        """How many calls take a block's time, on the rank that is slowest in them."""
        import torch
        import torch.distributed as dist

        self._mean_s(call, 2)
        count = torch.tensor(max(2, min(1000, int(_BLOCK_S / self._mean_s(call, 3)))))
        dist.all_reduce(count, dist.ReduceOp.MIN)
        return int(count)

    def _mean_s(self, call: Callable[[], object], count: int) -> float:
        import torch
        import torch.distributed as dist

        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        if self._is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count


def _shapes_of_weights(nbytes: int) -> list[list[Any]]:
    """Tensors without memory, those of a transformer of so many bytes, in lists of _FLAT_BYTES."""
    import torch

    width = 4096 if nbytes >= 1 << 30 else 64
    layer = [(width,)] * 2 + [(width, width)] * 4 + [(width, 11 * width // 4)] * 3
    lists: list[list[Any]] = [[]]
    left, room = nbytes, _FLAT_BYTES
    for shape in itertools.cycle(layer):
        if left <= 0:
            return lists
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        if tensor.nbytes > room:
            lists.append([])
            room = _FLAT_BYTES
        lists[-1].append(tensor)
        left, room = left - tensor.nbytes, room - tensor.nbytes
    raise AssertionError("a cycle has no end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of all_reduce's")
    parser.add_argument("--what", choices=PARTS, nargs="+", default=PARTS[:2])
    parser.add_argument("--weights", type=int, default=10**10, help="bytes of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-results", action="store_true", help="do not write the JSON file")
    options = parser.parse_args()
    if is_worker():
        Worker(options).run()
        return
    if not need("torch", "this is about its tensors"):
        return
    rows = measured_by(options.nproc_per_node)
    names = dict.fromkeys(name for row in rows for name in row if name != "what")
    columns = ["us", *names, "gloo/ours"]
    lines = []
    for row in rows:
        figures = {name: f"{value:.0f}" for name, value in row.items() if name != "what"}
        if "gloo" in row:
            figures["gloo/ours"] = f"{row['gloo'] / row['rallypoint']:.2f}"
        lines.append([row["what"], *(figures.get(each, "") for each in columns[1:])])
    print_table(columns, lines)
    if not options.no_results:
        parts = [] if tuple(options.what) == PARTS[:2] else options.what
        save("_".join(["shared_gpu", str(options.nproc_per_node), *parts]), rows)


if __name__ == "__main__":
    main()
