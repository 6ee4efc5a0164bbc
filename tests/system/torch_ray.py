"""Ray Train with backends of PyTorch's by name, on two nodes of the cluster at RAY_ADDRESS.

python torch_ray.py RESULTS.json BACKEND...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model
    from torch import nn

    assert dist.get_backend() == config["backend"]
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        inputs, targets = (torch.randn(8, width, generator=generator) for width in (8, 4))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    Path(f"{config['path']}.{dist.get_rank()}").write_text(json.dumps(losses))


def main(path: str, *backends: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init("auto")
    results = []
    for backend in backends:
        TorchTrainer(
            train,
            train_loop_config={"backend": backend, "path": path},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(storage_path=str(Path(path).parent)),
        ).fit()
        results.append([json.loads(Path(f"{path}.{rank}").read_text()) for rank in (0, 1)])
    ray.shutdown()
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
