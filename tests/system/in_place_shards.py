"""A worker that trains a linear model in shards, and dies where it is told.

    rallypoint run ... in_place_shards.py DIRECTORY STEPS [STEP:RANK ...]

RANK is one among the ranks that train, which kills itself in that step before the gradients are
complete. Each rank writes, after each update, a line of JSON, and at the end one more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import rallypoint as dist
from rallypoint import elastic

SIZE, SHARDS, SAMPLES, BATCH = 64, 2, 100, 24
BALLAST = 32_768  # numbers in each shard, beside the weights

sys.path.append(str(Path(__file__).parents[2]))

from tests.system.transfer_bytes import TransferBytes  # noqa: E402


def problem() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(7).standard_normal((SAMPLES, SIZE))
    return inputs, inputs @ np.arange(SIZE)


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    deaths = {(int(step), int(rank)) for step, rank in (each.split(":") for each in sys.argv[3:])}
    if deaths and os.environ.get("RALLYPOINT_STANDBY") == "1":
        time.sleep(float(os.environ.get("TEST_LATE_S", "0")))
    counted = TransferBytes()
    inputs, targets = problem()
    dist.init_process_group()
    replicas = elastic.Replicas(SHARDS)
    log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)
    ballast = np.full(BALLAST, replicas.shard if replicas.position.replica == 0 else -1)
    state = elastic.State(step=0, weights=np.ones(SIZE // SHARDS), ballast=ballast)
    sampler = elastic.Sampler(SAMPLES, BATCH)

    def tell(**more: object) -> None:
        told = {"step": state.step, "shard": replicas.shard, "size": replicas.size}
        log.write(json.dumps(told | {"weights": state.weights.tobytes().hex(), **more}) + "\n")

    full = int(os.environ["WORLD_SIZE"]) // SHARDS * SHARDS

    @elastic.run
    def train(state: elastic.State) -> str:
        while state.step < steps:
            whole = np.empty(SIZE)
            dist.all_gather_into_tensor(whole, state.weights, group=replicas.shard_group)
            batch = sampler.indices(state.step)
            gradient = (inputs[batch] @ whole - targets[batch]) @ inputs[batch] / BATCH
            mine = np.empty(SIZE // SHARDS)
            dist.reduce_scatter_tensor(mine, gradient, group=replicas.shard_group)
            if (state.step, replicas.rank) in deaths:
                with contextlib.suppress(FileExistsError):
                    (directory / f"died-{state.step}-{replicas.rank}").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(mine, group=replicas.replicate_group)
            with state.update():
                state.weights -= 0.01 * mine
                state.step += 1
                tell()
            time.sleep(0.002 if replicas.size == full else 0.02)  # a newcomer finds work to do
        return "trained"

    result = train(state)
    assert (ballast == replicas.shard).all() or replicas.is_idle
    told = {"received": counted.received, "own": counted.own}
    tell(result=result, is_idle=replicas.is_idle, **told)


if __name__ == "__main__":
    main()
