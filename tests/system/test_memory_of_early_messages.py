"""What comes early from another host takes bounded memory, however small its messages are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.test_forked_children import BEGIN_HERE, run_ranks

pytestmark = pytest.mark.system

# Rank 0 waits for the late rank 2 in its first call, and takes in what rank 1 sends meanwhile.
SCRIPT = """
def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
CALLS = 150_000
value = np.ones(1)
dist.reduce(value, 0)
before = resident_mib()
if rank == 2:
    time.sleep(3)
began = time.monotonic()
for call in range(CALLS):
    dist.reduce(value, 0)
    if rank == 0 and call == 0:
        grown = resident_mib() - before
        print(f"{grown:.1f} MiB")
        assert grown < 8, grown
        assert time.monotonic() - began > 2
dist.barrier()
dist.destroy_process_group()
"""


def test_small_messages_of_a_rank_that_is_far_ahead(tmp_path: Path) -> None:
    print(run_ranks(BEGIN_HERE + SCRIPT, tmp_path, ranks=3)[0])
