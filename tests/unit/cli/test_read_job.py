"""From flags to nodes, as torchrun reads them, and to where the output goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.flags import RunOptions, read_configuration, read_texts
from rallypoint.cli.options import UsageError
from rallypoint.cli.read_job import LaunchPlace, read_endpoints, read_logs, read_place
from rallypoint.launch.job import Nodes, Rendezvous
from rallypoint.launch.log_spec import STDERR, STDOUT, Destination, translate_template
from rallypoint.rendezvous.job.round import Endpoint


def place(**flags: str) -> LaunchPlace:
    texts = {f"--{name.replace('_', '-')}": text for name, text in flags.items()}
    return read_place(RunOptions(texts))


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
    assert note == "--standalone overrides --rdzv-backend, --rdzv-endpoint, --rdzv-id"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 29400)]),
        ("a:1", [("a", 1)]),
        ("[fd00::1]:2", [("fd00::1", 2)]),
        ("[fd00::1]", [("fd00::1", 29400)]),
        ("a:1, b,", [("a", 1), ("b", 29400)]),
    ],
)
def test_endpoints(text: str, expected: list[tuple[str, int]]) -> None:
    found = read_endpoints(text, "c10d")
    assert [(each.host, each.port) for each in found] == expected


def test_a_directory_that_all_machines_share() -> None:
    (found,) = read_endpoints("file:///shared//run/", "c10d")
    assert (found, found.is_directory) == (Endpoint(host="/shared/run", port=0), True)
    assert str(found) == "file:///shared/run"
    assert not Endpoint(host="a", port=1).is_directory


@pytest.mark.parametrize(
    ("text", "backend", "expected"),
    [
        ("file://shared/run", "c10d", "one absolute path, as in file:///shared/run"),
        ("file:shared", "c10d", "one absolute path"),
        ("file:///a,file:///b", "c10d", "one absolute path"),
        ("file:///shared/run", "static", "needs --rdzv-backend c10d"),
        ("file:///shared/run", "etcd", "needs --rdzv-backend c10d"),
    ],
)
def test_ill_formed_directories(text: str, backend: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read_endpoints(text, backend)


@pytest.mark.parametrize("text", [":1", "a:", "a:b", "a:65536", "fd00::1", "fd00::1:2", "[]:1"])
def test_ill_formed_endpoints(text: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        read_endpoints(text, "c10d")


def test_a_dynamic_rendezvous() -> None:
    found = place(
        nnodes="2:4",
        rdzv_backend="c10d",
        rdzv_endpoint="a:1,b:2",
        rdzv_conf="a=1, b = 2",
        rdzv_id="j",
        local_addr="10.0.0.7",
    )
    assert found.run_id == "j"
    assert found.rendezvous == Rendezvous(
        backend="c10d",
        endpoints=(Endpoint(host="a", port=1), Endpoint(host="b", port=2)),
        run_id="j",
        min_nodes=2,
        max_nodes=4,
        configuration={"a": "1", "b": "2"},
        local_addr="10.0.0.7",
    )


def test_a_dynamic_rendezvous_takes_a_wish() -> None:
    found = place(nnodes="2", rdzv_backend="etcd", rdzv_endpoint="a", node_rank="1").rendezvous
    assert found is not None
    assert found.node_rank == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"rdzv_backend": "c10d"}, "--rdzv-endpoint"),
        ({"rdzv_backend": "zeus", "rdzv_endpoint": "a"}, "--rdzv-backend"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "a", "node_rank": "2"}, "--node-rank"),
        ({"rdzv_endpoint": "a,b"}, "--rdzv-endpoint"),
        ({"standalone": "1"}, "--standalone"),
        ({"node_rank": "2"}, "--node-rank"),
        ({"node_rank": "x"}, "--node-rank"),
        ({"master_port": "65536"}, "--master-port"),
        ({"rdzv_conf": "timeout"}, "--rdzv-conf"),
        ({"rdzv_conf": "timeout=x"}, "--rdzv-conf"),
    ],
)
def test_contradictions_name_the_flag(flags: dict[str, str], named: str) -> None:
    with pytest.raises((UsageError, InvalidArgumentError), match=named):
        place(nnodes="2", **flags)


def test_configurations() -> None:
    assert read_configuration("") == {}
    assert read_configuration("timeout=60,x=a=b") == {"timeout": "60", "x": "a=b"}
    assert place(nnodes="2", rdzv_conf="timeout=60").nodes.join_timeout_s == 60.0


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("apple", ("apple",)),
        ("apple,orange", ("apple", "orange")),
        ("a,,b,c", ("a,b", "c")),
        ("a,,,b", ("a,", "b")),
    ],
)
def test_filters_escape_commas_by_doubling_them(text: str, texts: tuple[str, ...]) -> None:
    assert read_texts(text) == texts


@given(st.lists(st.text(st.characters(exclude_characters=","), min_size=1), min_size=1))
def test_filters_without_commas_are_a_list(texts: list[str]) -> None:
    assert read_texts(",".join(texts)) == tuple(texts)


def test_torchruns_prefix_template() -> None:
    template = "[${role_name}/{x}|${rank}-${local_rank}]"
    spec = read_logs(RunOptions(), {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template})
    prefix = spec.prefix_of(rank=5, local_rank=1, role="r", host="h")
    assert prefix == "[r/{x}|5-1]"
    assert translate_template("plain") == "plain"


def test_the_destinations_of_all_streams() -> None:
    values = {"--redirects": "0:3,1:1", "--tee": "1:2,2:3", "--local-ranks-filter": "0,1"}
    spec = read_logs(RunOptions(values), {})
    destinations = {
        (rank, stream): spec.destination_of(rank, stream) for rank in range(4) for stream in (1, 2)
    }
    assert destinations == {
        (0, STDOUT): Destination.FILE,
        (0, STDERR): Destination.FILE,
        (1, STDOUT): Destination.FILE,
        (1, STDERR): Destination.TEE,
        (2, STDOUT): Destination.FILE,  # not to be shown
        (2, STDERR): Destination.FILE,
        (3, STDOUT): Destination.DROPPED,
        (3, STDERR): Destination.DROPPED,
    }
    assert spec.are_kept


def test_without_flags_workers_write_themselves() -> None:
    spec = read_logs(RunOptions(), {})
    assert {spec.destination_of(0, STDOUT), spec.destination_of(3, STDERR)} == {
        Destination.INHERITED
    }
    assert not spec.are_kept
    assert (
        read_logs(RunOptions({"--log-prefix": "{rank}: "}), {}).destination_of(0, STDOUT)
        is Destination.PREFIXED
    )
    assert read_logs(RunOptions({"--log-dir": "x"}), {}).are_kept
