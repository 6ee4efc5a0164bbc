"""The same calls give the same bits in every run, whichever way messages go."""

from __future__ import annotations

import pytest
from tests.conftest import EACH_WAY
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

# Of private memory of peers: never read, always, as trials show, and by some ranks only.
WAYS = ("0", "1", "", "forged")
CALLS = 1_000 if EACH_WAY else 250

WORKER = """
import hashlib, os, random, sys
import numpy as np
way, seed, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["RALLYPOINT_DIRECT"] = "" if way == "forged" else way
import rallypoint as dist
from rallypoint.engine.communicator import PeerMemoryAccess

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
communicator = dist.group.WORLD.communicator
if way == "forged" and PeerMemoryAccess.PRIVATE in communicator.reach and rank % 2 == 0:
    communicator.set_reach(communicator.reach | PeerMemoryAccess.ALWAYS)
chance, digest = random.Random(seed), hashlib.sha256()
sizes = [1, 24, 31, 1_000, 9_000, 70_001, 300_000]

def filled(items, number):
    return np.random.default_rng([seed, number % 7, rank]).standard_normal(items, np.float32)

for number in range(calls):
    n, root = chance.choices(sizes, [4, 4, 4, 4, 2, 1, 1])[0], chance.randrange(ranks)
    name = chance.choice(["all_reduce", "all_reduce", "reduce", "reduce_scatter", "avg", "gather"])
    mine = filled(n, number)
    if name == "all_reduce":
        dist.all_reduce(mine)
    elif name == "avg":
        dist.all_reduce(mine, dist.ReduceOp.AVG)
    elif name == "reduce":
        dist.reduce(mine, root)
        mine = mine if rank == root else mine[:0]
    elif name == "gather":
        all_of = np.empty(n * ranks, np.float32)
        dist.all_gather_into_tensor(all_of, mine)
        mine = all_of
    else:
        dist.reduce_scatter_tensor(mine, filled(n * ranks, number))
    digest.update(mine.tobytes())
open(f"digest.{rank}", "w").write(digest.hexdigest())
dist.destroy_process_group()
"""


@pytest.mark.exact
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.seldom)])
def test_bits_do_not_depend_on_how_messages_go(launch: Launch, ranks: int, seed: int) -> None:
    script = launch.script(WORKER)
    found: dict[str, list[str]] = {}
    for way in WAYS:
        arguments = (script, way, str(seed), str(CALLS))
        assert launch.run("--nproc-per-node", str(ranks), *arguments) == 0, launch.err
        found[way] = [(launch.directory / f"digest.{rank}").read_text() for rank in range(ranks)]
    assert all(digests == found["0"] for digests in found.values()), found
