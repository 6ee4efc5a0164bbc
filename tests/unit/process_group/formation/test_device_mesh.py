"""Meshes of ranks that are threads, against the lines that NumPy cuts from the grid."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.formation import device_mesh
from rallypoint.process_group.groups.default import resolve
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[ProcessGroup], Any]], None]:
    """Ranks as threads, each of which has a default group of its own."""
    own = threading.local()
    monkeypatch.setattr(
        device_mesh, "resolve", lambda group: own.group if group is None else resolve(group)
    )
    monkeypatch.setattr(device_mesh, "is_initialized", lambda: True)

    def run(ranks: int, main: Callable[[ProcessGroup], Any]) -> None:
        def with_default(group: ProcessGroup) -> None:
            own.group = group
            main(group)

        run_ranks(ranks, with_default)

    return run


Run = Callable[[int, Callable[[ProcessGroup], Any]], None]


def test_groups_are_the_lines_of_the_grid(run: Run) -> None:
    grid = np.arange(6).reshape(2, 3)

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("data", "model"))
        row, column = divmod(me, 3)
        assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size(1)) == ((2, 3), 2, 6, 3)
        assert (mesh.get_rank(), mesh.get_coordinate()) == (me, (row, column))
        assert (mesh.get_local_rank("data"), mesh.get_local_rank(1)) == (row, column)
        assert mesh.get_group("data").ranks == tuple(grid[:, column])
        assert mesh.get_group(1).ranks == tuple(grid[row])
        assert mesh.get_all_groups() == [mesh.get_group(0), mesh.get_group(-1)]
        for name, line in (("data", grid[:, column]), ("model", grid[row])):
            mine = np.array([me])
            dist.all_reduce(mine, group=mesh.get_group(name))
            assert mine[0] == line.sum()
            part = mesh[name]
            assert part.mesh.tolist() == line.tolist()
            assert part.get_group() is mesh.get_group(name)
            assert part.get_local_rank() == mesh.get_local_rank(name)
        turned = mesh["model", "data"]
        assert turned.mesh.tolist() == grid.T.tolist()
        assert turned.get_all_groups() == mesh.get_all_groups()[::-1]
        again = dist.DeviceMesh.from_group(mesh.get_all_groups(), "cpu", grid)
        assert again.get_group(0) is mesh.get_group("data")
        line = dist.DeviceMesh.from_group(mesh.get_group("model"), "cpu")
        assert line.mesh.tolist() == grid[row].tolist()
        assert "data=2, model=3" in repr(mesh)

    run(6, main)


def test_three_dimensions_and_ranks_outside(run: Run) -> None:
    grid = np.array([[[5, 4], [3, 2]]])

    def main(group: ProcessGroup) -> None:
        mesh = dist.DeviceMesh("cpu", grid, mesh_dim_names=("a", "b", "c"))
        if group.rank() < 2:
            assert mesh.get_coordinate() is None
            with pytest.raises(dist.InvalidArgumentError, match=r"rank \d is not in this mesh"):
                mesh.get_group("a")
            return
        ((_, b, c),) = np.argwhere(grid == group.rank())
        assert mesh.get_group("a").ranks == (group.rank(),)
        assert mesh.get_group("b").ranks == tuple(grid[0, :, c])
        assert mesh["a", "c"].mesh.tolist() == [grid[0, b].tolist()]

    run(6, main)


def test_a_mesh_of_all_ranks_in_a_line_is_the_default_group(run: Run) -> None:
    def main(group: ProcessGroup) -> None:
        assert dist.init_device_mesh("cpu", (2,)).get_group() is group
        other = dist.init_device_mesh("cpu", (2,), backend_override={0: "tcp"}).get_group()
        assert dist.get_backend(other) == "tcp"

    run(2, main)


def test_what_makes_no_sense_is_refused(run: Run) -> None:
    def main(_: ProcessGroup) -> None:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        refused: list[tuple[Callable[[], object], str]] = [
            (lambda: dist.init_device_mesh("cpu", (0,)), "sizes of at least 1"),
            (lambda: dist.init_device_mesh("cpu", (2,)), "not a rank of this group"),
            (lambda: dist.init_device_mesh("cpu", (1,), mesh_dim_names="ab"), "1 different names"),
            (lambda: dist.DeviceMesh("cpu", [0, 0]), "names a rank twice"),
            (lambda: dist.DeviceMesh("cpu"), "must hold ranks"),
            (lambda: mesh.get_group(), "mesh_dim=None is not a dimension"),
            (
                lambda: mesh["c"],
                "mesh_dim='c' is not a dimension of this mesh, which has 2, named a, b",
            ),
            (lambda: mesh["a", "a"], "each only once"),
            (lambda: dist.DeviceMesh.from_group(mesh.get_all_groups(), "cpu"), "needs mesh="),
            (lambda: dist.DeviceMesh.from_group(mesh.get_group(0), "cpu", [[0]]), "2 dimensions"),
        ]
        for call, message in refused:
            with pytest.raises(dist.InvalidArgumentError, match=message):
                call()
        with pytest.raises(AttributeError, match="_flatten is not implemented"):
            mesh._flatten()

    run(1, main)
