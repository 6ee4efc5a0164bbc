"""Ray Train with our backend, on two nodes of the cluster at RAY_ADDRESS; and the same over gloo.

python torch_ray.py RESULTS.json

Both are trained in the same workers, as Ray Train takes most of a minute to start some.
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

    def losses_with(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
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
            losses.append(loss.item())
        return losses

    assert dist.get_backend() == "rallypoint"
    gloo = dist.new_group(backend="gloo")
    results = {
        "rallypoint": losses_with(prepare_model),
        "gloo": losses_with(
            lambda model: nn.parallel.DistributedDataParallel(model, process_group=gloo)
        ),
    }
    Path(f"{config['path']}.{dist.get_rank()}").write_text(json.dumps(results))


def main(path: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init("auto")
    TorchTrainer(
        train,
        train_loop_config={"path": path},
        torch_config=TorchConfig(backend="rallypoint"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(Path(path).parent)),
    ).fit()
    ray.shutdown()
    results = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in (0, 1)]
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
