"""Kills one of three ranks in the middle of backward, again and again; says what the others saw.

    python -m tests.system.torch_kills SEED KILLS OUTCOMES.json [KIND ...]

Kinds are ways to reduce gradients; there are so many kills of each. The ranks are forked, so that a
kill takes about half a second. One that hangs says where, and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as DistributedDataParallel does: once here, not in each fork
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS = ("plain", "python hook", "built-in hook", "power sgd", "fsdp")
HANGS_S = 40
RANKS = 3
VICTIM = 1
LEAST_S, MOST_S = 0.001, 0.06  # after the third step, when it is killed; a step takes about 0.02


def wrapped(kind: str) -> Any:
    layers = [nn.Linear(256, 256) for _ in range(16)]
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        return fully_shard(nn.Sequential(*layers))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    if kind == "python hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif kind == "power sgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def die(directory: Path) -> None:
    (directory / "killed_at").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def be_rank(rank: int, kind: str, delay_s: float, directory: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    dist.init_process_group(
        "rallypoint", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    model = wrapped(kind)
    for step in range(1_000_000):
        if step == 3 and rank == VICTIM:
            killer = threading.Timer(delay_s, die, (directory,))
            killer.daemon = True
            killer.start()
        place = "forward"
        try:
            loss = model(torch.ones(16, 256)).sum()
            place = "backward"
            loss.backward()
        except Exception as error:
            told = {
                "place": place,
                "after_s": time.time() - float((directory / "killed_at").read_text()),
                "kinds": [each.__name__ for each in type(error).__mro__],
                "rank": getattr(error, "rank", None),
                "words": str(error),
                "trace": traceback.format_exc(),
            }
            (directory / f"told_{rank}.json").write_text(json.dumps(told))
            return


def kill_once(kind: str, delay_s: float) -> list[dict[str, Any]]:
    """What the ranks that lived on have to tell, and how they ended."""
    directory = Path(tempfile.mkdtemp())
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, kind, delay_s, directory)
            sys.exit(0)  # as any script ends, with all that Python and torch do then
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    told: list[dict[str, Any]] = []
    for rank in set(range(RANKS)) - {VICTIM}:
        path = directory / f"told_{rank}.json"
        told.append(json.loads(path.read_text()) if path.exists() else {})
        told[-1]["ended"] = ends[rank]
    shutil.rmtree(directory)
    return told


def main() -> None:
    seed, kills, path, *kinds = sys.argv[1:]
    gc.freeze()  # else each fork copies all of torch when it ends
    moments = random.Random(int(seed))
    outcomes = {
        kind: [kill_once(kind, moments.uniform(LEAST_S, MOST_S)) for _ in range(int(kills))]
        for kind in kinds or KINDS
    }
    Path(path).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
