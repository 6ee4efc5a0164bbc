"""Ranks as threads of one process, each with its own member of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from rallypoint.engine import communicator
from rallypoint.process_group.formation import mesh
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.opening import form_world
from rallypoint.process_group.groups import call_errors
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.planning import AlgorithmOptions
from rallypoint.store.local_store import HashStore

chosen_backend = "shm"  # unless a test says otherwise; see conftest.py


def make_believe_host() -> str:
    """Where the rank of this thread is, if there are two hosts: the lower half on the first."""
    return threading.current_thread().name


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not get its turn is neither late nor a stranger, and its calls end."""
    monkeypatch.setattr(mesh, "_STRANGER_S", 200.0)
    monkeypatch.setattr(communicator, "_MOST_S", 200.0)
    monkeypatch.setattr(call_errors, "_PATIENCE", timedelta(seconds=200))


def await_at_barrier(group: ProcessGroup, rank: int, number: int) -> None:
    """Wait until that rank of the group has come to its monitored barrier of that number."""
    prefix = f"{group.world.prefix}/monitored_barrier/{group.group_name}"
    group.world.store.wait([f"{prefix}/{number}/{rank}"])


def run_ranks(
    ranks: int, main: Callable[[ProcessGroup], Any], *, timeout_s: float = 200, override: str = ""
) -> list[Any]:
    """Run `main` on each rank; return the results, or raise the first error: others follow it."""
    store = HashStore(timeout=timedelta(seconds=timeout_s))
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group: ProcessGroup | None = None
        try:
            request = GroupRequest(
                store=store,
                prefix="test",
                rank=rank,
                members=range(ranks),
                timeout=timedelta(seconds=timeout_s),
                options=AlgorithmOptions(override),
                backend=chosen_backend,
            )
            group = form_world(request)
            results[rank] = main(group)
        except BaseException as error:
            errors.append(error)
        finally:
            if group is not None:
                group.world.destroy()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"host {2 * rank // ranks}")
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
