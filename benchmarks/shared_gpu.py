"""Ranks that share a GPU: all_reduce of its tensors, and steps of DistributedDataParallel.

    python benchmarks/shared_gpu.py [--nproc-per-node 2] [--sizes 8 65536 ...] [--device cuda]

NCCL takes one rank per GPU. Our backend works in the GPU's memory (RALLYPOINT_DEVICE_MEMORY=1);
"staged" is ours through the host's, as gloo is. "copies" is what a GPU's two copies of the
tensor cost, to pinned memory and back, without anything between them. "elastic" is
`rallypoint.pytorch.elastic.DistributedDataParallel`, whose step also agrees on the update; "alone"
is the step without synchronisation. A call ends when the device has the result. Contenders take
turns in the same processes; figures are medians, on rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from ddp import built
from table import human_bytes, need, print_table, save
from workers import answer, is_worker, measured_by

WAYS = ("rallypoint", "staged", "gloo")
SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 128 << 20]
MODELS = ("transformer 10M", "transformer 50M")
_BLOCK_S = 0.1


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

        for nbytes in self._options.sizes:
            self._measure(human_bytes(nbytes), self._reductions(nbytes))
        for name in MODELS:
            self._measure(name, self._steps(name))
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of all_reduce's")
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
    columns = ["us", *WAYS, "gloo/ours", "copies", "elastic", "alone"]
    lines = []
    for row in rows:
        figures = {name: f"{value:.0f}" for name, value in row.items() if name != "what"}
        figures["gloo/ours"] = f"{row['gloo'] / row['rallypoint']:.2f}"
        lines.append([row["what"], *(figures.get(each, "") for each in columns[1:])])
    print_table(columns, lines)
    if not options.no_results:
        save(f"shared_gpu_{options.nproc_per_node}", rows)


if __name__ == "__main__":
    main()
