"""The same all_reduce on each backend that is installed here, as groups of one job.

rallypoint run --nproc-per-node 2 examples/communication/backends.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist

NEEDS = {
    "shm": True,  # shared memory
    "tcp": True,
    "gloo": dist.is_gloo_available(),
    "nccl": dist.is_nccl_available(),  # takes GPU tensors, which this example has not
    "hccl": dist.is_hccl_available(),  # of Ascend NPUs: has not run on one
}


def main() -> None:
    dist.init_process_group()
    for backend, is_there in NEEDS.items():
        if backend in ("nccl", "hccl"):
            result = "needs an accelerator's tensors" if is_there else "not installed"
        elif is_there:
            group = dist.new_group(backend=backend)
            values = np.full(3, dist.get_rank() + 1.0)
            dist.all_reduce(values, group=group)
            result = str(values)
        else:
            result = "not installed"
        if dist.get_rank() == 0:
            print(f"{backend}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
