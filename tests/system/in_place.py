"""A small training that goes on when ranks are lost; each step leaves a line in a file per process.

in_place.py DIRECTORY STEPS PAUSE_S [commit] [kills] [until] [host=N] [min_size=N] [shape=N]
in_place.py DIRECTORY STEPS PAUSE_S replay [shape=N]

kills: as DIRECTORY/plan says; see kill_points.py. until: DIRECTORY/enough is there, or the steps
are done. replay: the same without rallypoint.elastic, by as many ranks in each step as
DIRECTORY/sizes says.
"""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy

import rallypoint as dist
from rallypoint import elastic

directory, steps, pause_s, *wishes = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in wishes)
size = int(options.get("shape", "8"))

data = numpy.random.default_rng(7)
inputs = data.standard_normal((100, size))
targets = inputs @ numpy.arange(size) + 0.1 * data.standard_normal(100)
rate = 0.8 / size
sampler = elastic.Sampler(100, 24, seed=3)
# Test hosts number their processes apart.
number = int(options.get("host", "0")) * 10_000_000 + os.getpid()
log = os.open(f"{directory}/{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def gradient_of(step: int, weights: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
    error = inputs[indices] @ weights - targets[indices]
    gradient: numpy.ndarray = error @ inputs[indices] / sampler.global_batch
    return gradient


def tell(step: int, weights: numpy.ndarray, rank: int, ranks: int, indices: numpy.ndarray) -> None:
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
    samples = ",".join(map(str, indices))
    os.write(log, f"{step} {digest} {rank} {ranks} {time.monotonic():.6f} {samples}\n".encode())


def replay() -> None:
    sizes = json.loads(Path(f"{directory}/sizes").read_text())
    dist.init_process_group()
    rank = dist.get_rank()
    groups = {each: dist.new_group(range(each)) for each in sorted(set(sizes))}
    weights, before = numpy.ones(size), dist.get_world_size()
    for step, ranks in enumerate(sizes):
        group = groups[ranks]
        if rank < ranks:
            if ranks > before:
                dist.broadcast(weights, 0, group=group)
            indices = sampler.indices(step, rank, ranks)
            gradient = gradient_of(step, weights, indices)
            dist.all_reduce(gradient, group=group)
            weights -= rate * gradient
            tell(step + 1, weights, rank, ranks, indices)
        before = ranks


def is_enough() -> bool:
    """All ranks think the same."""
    told = numpy.array([Path(f"{directory}/enough").exists()])
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told[0])


def go_on_in_place() -> None:
    own_weights = numpy.full(size, float(os.getpid()))  # differs: rank 0's are everybody's
    state = elastic.State(step=0, weights=own_weights)
    commits = "commit" in options
    reach: Any = lambda place: None  # noqa: E731
    if "kills" in options:
        sys.path.append(str(Path(__file__).parents[2]))
        from tests.system.kill_points import follow

        reach = follow(Path(directory), state)

    def tell_commit() -> None:
        tell(state.step, state.weights, dist.get_rank(), dist.get_world_size(), numpy.empty(0))

    @elastic.run(min_size=int(options.get("min_size", "1")))
    def train(state: elastic.State) -> None:
        assert state.weights is own_weights or commits
        if not state.step:
            state.weights[:] = 1.0
            if commits:
                state.commit()
        while state.step < int(steps) and not ("until" in options and is_enough()):
            if commits:
                tell_commit()  # here, as what follows commit() is not reached if ranks change in it
            indices = sampler.indices(state.step)
            gradient = gradient_of(state.step, state.weights, indices)
            reach("reduce")
            dist.all_reduce(gradient)
            time.sleep(float(pause_s))
            if commits:
                state.weights -= rate * gradient
                dist.barrier()
                state.step += 1
                state.commit()
                continue
            with state.update():
                reach("update")
                state.weights -= rate * gradient
                reach("half an update")
                state.step += 1
                tell(state.step, state.weights, dist.get_rank(), dist.get_world_size(), indices)
        if commits:
            tell_commit()

    timeout = timedelta(seconds=float(options.get("timeout_s", "1800")))
    dist.init_process_group(timeout=timeout)
    group = dist.group.WORLD
    train(state)
    assert dist.group.WORLD is group
    numpy.save(f"{directory}/{number}.npy", state.weights)
    os.write(1, f"end {os.getpid()} {dist.get_rank()} {dist.get_world_size()}\n".encode())


replay() if "replay" in options else go_on_in_place()
dist.destroy_process_group()
