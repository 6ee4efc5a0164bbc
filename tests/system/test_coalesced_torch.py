"""Coalesced collectives, beside torch's own over gloo, on the same numbers."""

from __future__ import annotations

import pytest
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]


@pytest.mark.exact
def test_the_same_as_torch(launch: Launch) -> None:
    pytest.importorskip("torch")
    script = launch.script(
        "import os, torch, torch.distributed as theirs, rallypoint as ours\n"
        "theirs.init_process_group('gloo')\n"
        "ours.init_process_group()\n"
        "rank, ranks = ours.get_rank(), ours.get_world_size()\n"
        "def fresh():\n"
        "    torch.manual_seed(rank)\n"
        "    return [torch.randint(99, (n,)).float() for n in (4, 1, 5000)]\n"
        "told = []\n"
        "for dist in (theirs, ours):\n"
        "    seen = []\n"
        "    arrays = fresh()\n"
        "    dist.all_reduce_coalesced(arrays)\n"
        "    seen += arrays\n"
        "    lists = [[torch.zeros_like(a) for a in arrays] for _ in range(ranks)]\n"
        "    dist.all_gather_coalesced(lists, fresh())\n"
        "    seen += [a for arrays in lists for a in arrays]\n"
        "    arrays = fresh()\n"
        "    with dist._coalescing_manager():\n"
        "        for array in arrays: dist.all_reduce(array)\n"
        "    seen += arrays\n"
        "    arrays, out = fresh(), [torch.zeros(ranks * a.numel()) for a in arrays]\n"
        "    with dist._coalescing_manager(async_ops=True) as manager:\n"
        "        for whole, array in zip(out, arrays): dist.all_gather_single(whole, array)\n"
        "    manager.wait()\n"
        "    seen += out\n"
        "    told.append(seen)\n"
        "assert len(told[0]) == len(told[1]) > 12\n"
        "assert all(map(torch.equal, *told))\n"
        "open(f'done.{rank}', 'w').close()\n"
        "os._exit(0)\n"  # else gloo's threads may abort the process (pytorch/pytorch#190489)
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 3
