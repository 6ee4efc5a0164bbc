"""Says which devices this worker sees."""

import os

import torch
from tests.gpu.workers.on_device import IS_GPU, own_device, say

seen = torch.cuda.device_count() if IS_GPU else 0
on_it = float(torch.ones(3, device=own_device()).sum())
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
say("rank", os.environ["RANK"], os.environ["LOCAL_RANK"], visible, seen, on_it)
