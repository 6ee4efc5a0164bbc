"""From flags to machines, as torchrun reads them."""

from __future__ import annotations

import pytest

from rallypoint.cli.nodes import Place, read_configuration, read_place
from rallypoint.launch.job import Nodes


def place(**flags: str) -> Place:
    return read_place({f"--{name.replace('_', '-')}": text for name, text in flags.items()}, {})


def test_one_machine_needs_nothing_and_takes_any_port() -> None:
    assert place().nodes == Nodes()
    assert place().run_id != place().run_id


def test_a_port_makes_it_static() -> None:
    assert place(master_port="1234").nodes == Nodes(master_port=1234)
    assert place(master_port="1234").run_id == "none"
    assert place(rdzv_endpoint="10.0.0.1:77").nodes == Nodes(master_addr="10.0.0.1", master_port=77)


def test_several_machines_have_torchruns_default_port() -> None:
    found = place(nnodes="2", node_rank="1", master_addr="[fd00::1]", rdzv_id="job")
    assert found.nodes == Nodes(count=2, node_rank=1, master_addr="fd00::1", master_port=29500)
    assert (found.run_id, found.rendezvous) == ("job", None)


def test_an_endpoint_overrules_the_master_address() -> None:
    found = place(nnodes="2", master_addr="a", master_port="1", rdzv_endpoint="b:2").nodes
    assert (found.master_addr, found.master_port) == ("b", 2)


def test_standalone_overrules_what_is_for_several_machines() -> None:
    found = place(standalone="1", rdzv_id="job", rdzv_endpoint="a:1", rdzv_backend="etcd")
    assert found.nodes == Nodes()
    assert found.run_id != "job"
    (note,) = found.notes
    assert note == "--standalone overrules --rdzv-backend, --rdzv-endpoint, --rdzv-id"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("a", "a:29400"), ("a:1", "a:1"), ("[fd00::1]:2", "[fd00::1]:2"), ("[fd00::1]", None)],
)
def test_a_dynamic_rendezvous(endpoint: str, expected: str | None) -> None:
    found = place(nnodes="2:4", rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_conf="a=1, b = 2")
    assert found.rendezvous is not None
    assert found.rendezvous.endpoint == (expected or "[fd00::1]:29400")
    assert (found.rendezvous.min_nodes, found.rendezvous.max_nodes) == (2, 4)
    assert found.rendezvous.configuration == {"a": "1", "b": "2"}
    assert found.rendezvous.node_rank is None


def test_configurations() -> None:
    assert read_configuration("") == {}
    assert read_configuration("timeout=60,x=a=b") == {"timeout": "60", "x": "a=b"}
    assert place(nnodes="2", rdzv_conf="timeout=60").nodes.join_timeout_s == 60.0
