"""Two workers of Ray Train, with a backend of PyTorch's by name.

python torch_ray.py BACKEND RESULTS.json
"""

from __future__ import annotations

import json
import sys
import tempfile
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


def main(backend: str, path: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Ray's sockets must have short names.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=directory,
            _node_ip_address="127.0.0.1",
        )
        TorchTrainer(
            train,
            train_loop_config={"backend": backend, "path": path},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=directory),
        ).fit()
        ray.shutdown()
    losses = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in (0, 1)]
    Path(path).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
