"""Three ways in which ranks find each other: env://, file:// and tcp://.

rallypoint run --nproc-per-node 2 examples/communication/init_methods.py

env://, the default, reads variables: those of `rallypoint run` and torchrun, or those of srun and
mpirun if they start the script without a launcher. The others name a file that all ranks share, or
rank 0's address. They take rank and world size as arguments.
"""

from __future__ import annotations

import socket
import tempfile

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group(init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        places = [f"file://{folder}/ranks", f"tcp://127.0.0.1:{server.getsockname()[1]}"]
        dist.broadcast_object_list(places, src=0)  # usually, you write them down
        server.close()
        for place in ("env://", *places):
            if place != "env://":
                dist.init_process_group(init_method=place, rank=rank, world_size=size)
            total = np.full(1, rank + 1)
            dist.all_reduce(total)
            print(f"{place.partition(':')[0]}: rank {rank} of {size}, sum {total[0]}")
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
