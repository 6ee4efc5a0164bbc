"""Parameters and their errors: the same as PyTorch's, call by call."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from rallypoint import rendezvous as ours
from rallypoint.store.local_store import HashStore

VALUES = [True, False, 1, 0, 2, -1, "1", "0", "true", "T", "yes", "Y", "False", "n", "", "x", 1.5]
CALLS: list[tuple[str, Callable[[Any], object]]] = [
    *(
        (f"numbers {least}:{most}", lambda r, n=(least, most): _parameters(r, *n).max_nodes)
        for least in (-1, 0, 1, 3)
        for most in (-1, 0, 2, 3)
    ),
    *(
        (f"bool {value!r}", lambda r, v=value: _parameters(r, x=v).get_as_bool("x"))
        for value in VALUES
    ),
    *(
        (f"int {value!r}", lambda r, v=value: _parameters(r, x=v).get_as_int("x"))
        for value in VALUES
    ),
    ("default", lambda r: _parameters(r).get("x", 3)),
    ("default bool", lambda r: _parameters(r).get_as_bool("x", True)),
    ("no default", lambda r: _parameters(r).get_as_int("x")),
    ("config", lambda r: _parameters(r, a=1, b="c").config),
    ("no backend", lambda r: r.RendezvousParameters("", "", "", 1, 1)),
    ("unknown", lambda r: _registry(r).create_handler(_parameters(r))),
    ("no name", lambda r: _registry(r).register("", print)),
    ("twice", lambda r: [_registry(r, x=print).register("x", print)]),
    ("other", lambda r: _registry(r, x=print).register("x", repr)),
    ("wrong name", lambda r: _registry(r, b=lambda _: _Named("c")).create_handler(_parameters(r))),
    ("made", lambda r: _registry(r, b=lambda _: _Named("b")).create_handler(_parameters(r)).name),
    ("zero timeout", lambda r: _timeout(r)(join=timedelta(0))),
    ("timeout", lambda r: _timeout(r)(close=timedelta(seconds=3)).close),
    ("default timeout", lambda r: _timeout(r)().join),
    ("no run id", lambda r: _dynamic(r, run_id="")),
    ("no nodes", lambda r: _dynamic(r, min_nodes=0)),
    ("fewer nodes", lambda r: _dynamic(r, max_nodes=1)),
    ("static without rank", lambda r: _static(r, endpoint="h:1")),
    ("static without endpoint", lambda r: _static(r, rank=0)),
    ("static without port", lambda r: _static(r, endpoint="h", rank=0)),
    ("static", lambda r: _static(r, endpoint="h:1", rank=0).get_run_id()),
    ("static waits for none", lambda r: _static(r, endpoint="h:1", rank=0).num_nodes_waiting()),
]


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_backend(self) -> str:
        return self.name


def _parameters(r: Any, least: int = 1, most: int = 2, **config: object) -> Any:
    return r.RendezvousParameters("b", "e", "r", least, most, None, **config)


def _registry(r: Any, **creators: object) -> Any:
    registry = r.RendezvousHandlerRegistry()
    for name, creator in creators.items():
        registry.register(name, creator)
    return registry


def _timeout(r: Any) -> Any:
    if r is ours:
        return ours.RendezvousTimeout
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous.RendezvousTimeout


def _dynamic(r: Any, run_id: str = "r", min_nodes: int = 2, max_nodes: int = 3) -> Any:
    if r is ours:
        return ours.DynamicRendezvousHandler.from_backend(
            run_id, HashStore(), "b", min_nodes, max_nodes
        )
    import torch.distributed as torch_dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    store = torch_dist.HashStore()
    backend = c10d_rendezvous_backend.C10dRendezvousBackend(store, "r")
    return dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
        run_id, store, backend, min_nodes, max_nodes
    )


def _static(r: Any, endpoint: str = "", **config: object) -> Any:
    parameters = r.RendezvousParameters("static", endpoint, "r", 2, 2, None, **config)
    if r is ours:
        return ours.get_rendezvous_handler(parameters)
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    return static_tcp_rendezvous.create_rdzv_handler(parameters)


def outcome(call: Callable[[Any], object], r: Any) -> object:
    try:
        return call(r)
    except ValueError:
        return ValueError
    except RuntimeError:
        return RuntimeError


@pytest.mark.needs_torch
@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_as_torch(name: str, call: Callable[[Any], object]) -> None:
    from torch.distributed.elastic import rendezvous as torchs

    assert outcome(call, ours) == outcome(call, torchs), name


@pytest.mark.needs_torch
def test_the_interface_is_torchs() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousHandler as Torchs

    missing = {name for name in vars(Torchs) if not name.startswith("_")} - set(
        dir(ours.RendezvousHandler)
    )
    assert missing == set()
    assert Torchs.__abstractmethods__ == ours.RendezvousHandler.__abstractmethods__
