"""The Ray cluster that is found or not, and where agents on it work, with which environment."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cli.ray.cluster import Cluster, directory_on_node, first_line, without_ray

HERE, THERE = "/tmp/ray/s1/working_dir_files/_ray_pkg_a1", "/scratch/s2/files/_ray_pkg_a1"
PACKAGE = "gcs://_ray_pkg_a1.zip"


def test_the_same_place_in_each_nodes_copy() -> None:
    assert directory_on_node(HERE, THERE, PACKAGE) == THERE
    assert directory_on_node(f"{HERE}/examples/gpt", THERE, PACKAGE) == f"{THERE}/examples/gpt"


def test_the_same_path_without_copies() -> None:
    assert directory_on_node("/home/me/train", "/root", "") == "/home/me/train"
    assert directory_on_node("/home/me/train", THERE, PACKAGE) == "/home/me/train"


def test_what_ray_sets_for_itself_is_left_out() -> None:
    environ = {"OMP_NUM_THREADS": "8", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace", "HOME": "/me"}
    assert without_ray(environ, {"HOME"}) == {"HOME": "/me"}
    theirs = {"OMP_NUM_THREADS": "4", "PYTHONBREAKPOINT": "pudb.set_trace"}
    assert without_ray(theirs, set(theirs)) == theirs


@pytest.mark.parametrize("address", ["http://head:8265", "ray://head:10001", "local", "head"])
def test_an_address_of_another_kind(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        HostError, match=rf"RAY_ADDRESS is {address}, not HOST:PORT .* ray job submit"
    ):
        Cluster()


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(HostError, match=r"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"):
        Cluster()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(HostError, match=r"--on ray needs Ray .* pip install ray"):
        Cluster()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ConnectionError("Could not find any running Ray instance."),
            r"there is no Ray cluster here, and RAY_ADDRESS names none; .* ray job submit",
        ),
        (
            RuntimeError("Version mismatch:\n  The cluster was started with Ray: 2.40.0"),
            "Ray refused the connection: Version mismatch:",
        ),
    ],
)
def test_ray_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, told: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = Mock(**{"init.side_effect": error})
    monkeypatch.setattr("rallypoint.cli.ray.cluster._import_ray", lambda: ray)
    with pytest.raises(HostError, match=f"--on ray: {told}"):
        Cluster()


def test_which_ends_of_an_actor_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("ray").exceptions
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rallypoint.cli.ray.cluster._import_ray", lambda: Mock(exceptions=errors))
    cluster = Cluster()
    lost = (errors.NodeDiedError("lost"), errors.ActorUnschedulableError("gone"))
    for error in (*lost, errors.ActorDiedError(), errors.ActorUnavailableError("?", None)):
        assert cluster.why_hopeless(error) == ""
    missing = errors.RaySystemError("...\nModuleNotFoundError: No module named 'rallypoint'")
    assert cluster.why_hopeless(missing).startswith("install Rallypoint there as well")
    full = errors.RaySystemError("no space left on device\nand a page more")
    assert cluster.why_hopeless(full) == "System error: no space left on device"


def test_a_page_of_ray_as_a_line() -> None:
    assert first_line(RuntimeError("\n  It failed.\n\tclass_name: S\n")) == "It failed"
    assert first_line(ValueError()) == "ValueError"
