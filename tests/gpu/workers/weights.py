"""A rank of examples/new_weights_torch.py on its device, in buckets of one tensor and of several.

weights.py train|serve PORT
"""

import sys
from pathlib import Path

import torch.distributed as dist
from tests.gpu.workers import on_device as device

sys.path.append(str(Path(__file__).parents[3] / "examples"))
import new_weights_torch as example

role, port = sys.argv[1:]
example.DEVICE, example.PORT, example.BUCKET_BYTES = device.own_device(), int(port), 40_500
dist.init_process_group("rallypoint")
{"train": example.train, "serve": example.serve}[role]()
dist.destroy_process_group()
