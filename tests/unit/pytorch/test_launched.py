"""What PyTorch's env:// reads is set before it reads it, where a launcher of others' is at work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.pmi import meeting
from rallypoint.pytorch.launched import call_first, install

ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As Hydra starts a job of one process."""
    before_it = dict(os.environ)
    for name in (*NAMES, "TORCHELASTIC_RUN_ID", "RALLYPOINT_CLUSTER"):
        os.environ.pop(name, None)
    os.environ.update(ALONE)
    monkeypatch.setattr(meeting, "_meeting", None)
    monkeypatch.setattr(meeting, "_announced", ())
    yield monkeypatch
    if meeting._meeting is not None:
        meeting._meeting.store.close()
        assert meeting._meeting.server is not None
        meeting._meeting.server.close()
    os.environ.clear()
    os.environ.update(before_it)


def theirs(url: str, **named: Any) -> Iterator[Any]:
    yield url, named, {name: os.environ.get(name) for name in NAMES}


def test_whoever_has_set_all_is_left_alone(environ: pytest.MonkeyPatch) -> None:
    said = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    os.environ.update(said)
    url, named, found = next(call_first(theirs)("env://", timeout=None))
    assert (url, named) == ("env://", {"timeout": None})
    assert found == {**dict.fromkeys(NAMES), **said}
    assert meeting._meeting is None


def test_nothing_is_done_where_nothing_is_recognised(environ: pytest.MonkeyPatch) -> None:
    os.environ["RALLYPOINT_CLUSTER"] = "none"
    _, _, found = next(call_first(theirs)("env://"))
    assert found == dict.fromkeys(NAMES)


def test_what_the_caller_gives_must_agree(environ: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="RANK is 3, but Hydra's mpiexec says 0"):
        next(call_first(theirs)("env://?rank=3&world_size=4"))


@pytest.mark.needs_torch
def test_a_job_of_one_finds_itself_with_pytorchs_store(environ: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    rendezvous = sys.modules["torch.distributed.rendezvous"]
    table = dict(rendezvous._rendezvous_handlers)
    environ.setattr(rendezvous, "_rendezvous_handlers", table)
    stock = table["env"]
    stock = getattr(stock, "__wrapped__", stock)
    table["env"] = stock
    install()
    assert table["env"] is not stock
    ours = table["env"]
    install()
    assert table["env"] is ours
    store, rank, size = next(rendezvous.rendezvous("env://"))
    assert (rank, size, type(store)) == (0, 1, dist.TCPStore)
    assert {name: os.environ.get(name) for name in NAMES[:5]} == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    assert store.port == int(os.environ["MASTER_PORT"])


@pytest.mark.parametrize("table", [None, {}, ["env"]])
def test_another_pytorch_is_left_alone(table: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_rendezvous_handlers=table)
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", module)
    install()
    assert module._rendezvous_handlers is table
    monkeypatch.delitem(sys.modules, "torch.distributed.rendezvous")
    install()
