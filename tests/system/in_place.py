"""A small training that goes on when ranks are lost; each step leaves a line in a file per process.

in_place.py DIRECTORY STEPS PAUSE_S [commit] [min_size=N] [shape=N]
"""

import hashlib
import os
import sys
import time

import numpy

import rallypoint as dist
from rallypoint import elastic

directory, steps, pause_s, *wishes = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in wishes)
size = int(options.get("shape", "8"))

data = numpy.random.default_rng(7)
inputs = data.standard_normal((100, size))
targets = inputs @ numpy.arange(size) + 0.1 * data.standard_normal(100)
sampler = elastic.Sampler(100, 24, seed=3)
own_weights = numpy.full(size, float(os.getpid()))  # differs: rank 0's are everybody's
state = elastic.State(step=0, weights=own_weights)
log = os.open(f"{directory}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def tell(indices: numpy.ndarray) -> None:
    digest = hashlib.sha256(state.weights.tobytes()).hexdigest()[:16]
    samples = ",".join(map(str, indices))
    line = f"{state.step} {digest} {dist.get_rank()} {dist.get_world_size()} {samples}"
    os.write(log, f"{line}\n".encode())


@elastic.run(min_size=int(options.get("min_size", "1")))
def train(state: elastic.State) -> None:
    assert state.weights is own_weights or "commit" in options
    if not state.step:
        state.weights[:] = 1.0
        if "commit" in options:
            state.commit()
    while state.step < int(steps):
        indices = sampler.indices(state.step)
        error = inputs[indices] @ state.weights - targets[indices]
        gradient = error @ inputs[indices] / sampler.global_batch
        dist.all_reduce(gradient)
        time.sleep(float(pause_s))
        if "commit" in options:
            state.weights -= 0.1 * gradient
            dist.barrier()
            state.step += 1
            state.commit()
            tell(indices)
            continue
        with state.update():
            state.weights -= 0.1 * gradient
            state.step += 1
            tell(indices)


dist.init_process_group()
group = dist.group.WORLD
train(state)
assert dist.group.WORLD is group
numpy.save(f"{directory}/{os.getpid()}.npy", state.weights)
os.write(1, f"end {os.getpid()} {dist.get_rank()} {dist.get_world_size()}\n".encode())
dist.destroy_process_group()
