"""Two torchft replicas, each with a launcher of its own, train together; one may be killed.

    python torch_torchft.py BACKEND KILLED_STEP RESULTS.json    -1: none is killed

BACKEND is gloo or rallypoint, for a group of torchft's; or reconfigure, for torch's own default
group, which torchft-nightly accepts. The second replica kills itself once, before KILLED_STEP, and
is started again by its launcher; it gets the other's state, and the step is made again by both.
Losses of each step, as each replica saw them, and the sums of the weights at the end go to
RESULTS.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 6


def main(backend: str, killed_step: str, results: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000)
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    launchers = [
        subprocess.Popen(
            [
                sys.executable,
                *["-m", "rallypoint", "run", "--max-restarts", "2", __file__],
                *["replica", str(replica), backend, killed_step, str(results)],
            ],
            env=environ,
        )
        for replica in (0, 1)
    ]
    try:
        assert [launcher.wait() for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.terminate()
        lighthouse.shutdown()
    results.write_text(json.dumps([json.loads(each.read_text()) for each in places(results)]))


def places(results: Path) -> list[Path]:
    return [results.with_suffix(f".{replica}") for replica in (0, 1)]


def replicate(replica: int, backend: str, killed_step: int, results: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from rallypoint.pytorch.torchft import ProcessGroupRallypoint

    timeout = timedelta(seconds=30)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group: Any
    if backend == "reconfigure":
        dist.init_process_group("rallypoint", timeout=timeout, enable_reconfigure=True)
        group = dist.group.WORLD
    else:
        kind = ProcessGroupRallypoint if backend == "rallypoint" else ProcessGroupGloo
        group = kind(timeout=timeout)
    manager = Manager(
        pg=group,
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timeout,
    )
    ddp = DistributedDataParallel(manager, model)
    managed = Optimizer(manager, optimizer)
    losses = {}
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while (step := manager.current_step()) < STEPS:
        if replica == 1 and is_first_life and step == killed_step:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + replica)
        managed.zero_grad()
        inputs, targets = (torch.randn(8, width, generator=generator) for width in (8, 4))
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        managed.step()
        losses[step] = float(loss)  # of the last time, if the step was made again
    weights = sum(float(each.abs().sum()) for each in model.parameters())
    places(results)[replica].write_text(json.dumps({"losses": losses, "weights": weights}))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replicate(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
