"""Ranks in a grid with named dimensions, and a group for each line of it: torch's DeviceMesh.

    mesh_dim_names=("data", "model")        ranks 0 1 2      "data" groups: 0 3, 1 4, 2 5
    mesh_shape=(2, 3)                             3 4 5      "model" groups: 0 1 2, 3 4 5

A mesh has no devices here: it says which ranks communicate. Methods of torch's mesh that are not
below raise an error that names those that are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

import numpy as np

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.process_group.formation.opening import init_process_group
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.default import is_initialized, resolve
from rallypoint.process_group.groups.group import ProcessGroup

Ranks = np.ndarray[Any, Any]


class DeviceMesh:
    """A grid of global ranks; all ranks of the default group create it, with the same arguments.

    Args:
        device_type: kept as an attribute; otherwise unused.
        mesh: the ranks, as nested lists or an array; each at most once.
        mesh_dim_names: a name for each dimension.
        backend_override: dimension (by name or number) -> backend of its groups; the default
            group's backend unless given.

    Attributes:
        mesh: the ranks, as an array.
        mesh_dim_names: the names, or None.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: ranks or names are invalid.
        StoreTimeoutError: some ranks did not join; the message names them.
    """

    _groups: list[ProcessGroup | None]  # this rank's, by dimension

    def __init__(
        self,
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, str] | None = None,
    ) -> None:
        ranks = np.array(mesh)
        if not ranks.size or ranks.dtype.kind not in "iu":
            raise InvalidArgumentError(f"mesh must hold ranks, not {mesh!r}")
        ranks = ranks.reshape(1) if ranks.ndim == 0 else ranks
        self._arrange(
            device_type, ranks, _names(mesh_dim_names, ranks.ndim), resolve(None).own_rank
        )
        backends = self._backends(backend_override or {})
        self._groups = [_line_of(ranks, dim, backends.get(dim)) for dim in range(ranks.ndim)]

    def _arrange(
        self, device_type: str, ranks: Ranks, names: tuple[str, ...] | None, own_rank: int
    ) -> None:
        if len(np.unique(ranks)) < ranks.size:
            raise InvalidArgumentError(f"mesh names a rank twice: {ranks.tolist()}")
        self.device_type = device_type
        self.mesh = ranks
        self.mesh_dim_names = names
        self._own_rank = own_rank
        found = np.argwhere(ranks == own_rank)
        self._coordinate = tuple(map(int, found[0])) if len(found) else None

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create the mesh of existing groups: a line for one group, a dimension each for several.

        Args:
            mesh: the ranks; required for several groups. Along each dimension, this rank's line
                must be the ranks of that group.

        Raises:
            InvalidArgumentError: the groups and the mesh do not match.
        """
        groups = group if isinstance(group, list) else [group]
        if mesh is None and len(groups) != 1:
            raise InvalidArgumentError("from_group needs mesh= unless there is exactly one group")
        ranks = np.array(resolve(groups[0]).ranks if mesh is None else mesh)
        if ranks.ndim != len(groups):
            raise InvalidArgumentError(
                f"from_group: the mesh has {ranks.ndim} dimensions, but there are {len(groups)} "
                "groups"
            )
        made = cls.__new__(cls)
        own_rank = groups[0].ranks[groups[0].own_rank]
        made._arrange(device_type, ranks, _names(mesh_dim_names, ranks.ndim), own_rank)
        for dim, each in enumerate(groups):
            if made._line(dim) != list(each.ranks):
                raise InvalidArgumentError(
                    f"from_group: along dimension {dim} the mesh has ranks {made._line(dim)}, but "
                    f"the group has {list(each.ranks)}"
                )
        made._groups = [*groups]
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        """The number of ranks, in total or along a dimension."""
        return self.mesh.size if mesh_dim is None else self.shape[self._dimension(mesh_dim)]

    def get_rank(self) -> int:
        """This process's global rank."""
        return self._own_rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinates in the mesh; None if it is not in it."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along a dimension, which may be omitted if there is only one.

        Raises:
            InvalidArgumentError: there is no such dimension, or this rank is not in the mesh.
        """
        return self._member()[self._dimension(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group of this rank's line along a dimension; omit `mesh_dim` if there is only one.

        Raises:
            InvalidArgumentError: there is no such dimension, or this rank is not in the mesh.
        """
        self._member()
        group = self._groups[self._dimension(mesh_dim)]
        assert group is not None
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """This rank's groups, one for each dimension.

        Raises:
            InvalidArgumentError: there is no such dimension, or this rank is not in the mesh.
        """
        return [self.get_group(dim) for dim in range(self.ndim)]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The submesh of the named dimensions through this rank; it uses the same groups."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        dims = [self._dimension(name) for name in names]
        if not dims or len(set(dims)) < len(dims):
            raise InvalidArgumentError(f"mesh[{names}] must name dimensions, and each only once")
        index: list[int | slice] = list(self._member())
        for dim in dims:
            index[dim] = slice(None)
        ranks = self.mesh[tuple(index)].transpose([sorted(dims).index(dim) for dim in dims])
        part = DeviceMesh.__new__(DeviceMesh)
        part._arrange(self.device_type, ranks, names, self._own_rank)
        part._groups = [self._groups[dim] for dim in dims]
        return part

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(
            f"DeviceMesh.{name} is not implemented; rallypoint's DeviceMesh has shape, ndim, "
            "size, mesh, mesh_dim_names, get_group, get_all_groups, get_rank, get_local_rank, "
            "get_coordinate, from_group, and dimensions by name"
        )

    def __repr__(self) -> str:
        names = self.mesh_dim_names or range(self.ndim)
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True))
        return f"DeviceMesh(({sizes}), {self.device_type!r}, {self.mesh.tolist()})"

    def _member(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise InvalidArgumentError(f"rank {self._own_rank} is not in this mesh")
        return self._coordinate

    def _line(self, dim: int) -> list[int]:
        """This rank, and the ranks that differ from it only along one dimension."""
        index: list[int | slice] = list(self._member())
        index[dim] = slice(None)
        return [int(rank) for rank in self.mesh[tuple(index)]]

    def _dimension(self, given: int | str | None) -> int:
        names = self.mesh_dim_names or ()
        if given is None and self.ndim == 1:
            return 0
        if isinstance(given, str) and given in names:
            return names.index(given)
        if type(given) is int and -self.ndim <= given < self.ndim:
            return given % self.ndim
        raise InvalidArgumentError(
            f"mesh_dim={given!r} is not a dimension of this mesh, which has {self.ndim}, named "
            f"{', '.join(names) or 'by numbers only'}"
        )

    def _backends(self, override: Mapping[int | str, str]) -> dict[int, str]:
        for backend in override.values():
            if not isinstance(backend, str):
                raise InvalidTypeError(f"backend_override must name backends, not {backend!r}")
        return {self._dimension(dim): backend for dim, backend in override.items()}


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, str] | None = None,
) -> DeviceMesh:
    """The mesh of the first ranks, in order; forms the default group first if there is none.

    Args:
        mesh_shape: the number of ranks along each dimension.
        device_type, mesh_dim_names, backend_override: as in DeviceMesh.

    Raises:
        InvalidArgumentError: there are too few ranks, or names are invalid.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some ranks did not join; the message names them.
        PeerLostError: a rank died while a group was forming.
        HostError: ranks on different machines cannot connect.
    """
    shape = tuple(mesh_shape)
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise InvalidArgumentError(f"mesh_shape={mesh_shape!r} must hold sizes of at least 1")
    if not is_initialized():
        init_process_group()
    return DeviceMesh(
        device_type,
        np.arange(math.prod(shape)).reshape(shape),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
    )


def _names(names: Sequence[str] | None, dims: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = tuple(names)
    if len(found) != dims or len(set(found)) < dims:
        raise InvalidArgumentError(
            f"mesh_dim_names={found} must be {dims} different names, one for each dimension"
        )
    return found


def _line_of(ranks: Ranks, dim: int, backend: str | None) -> ProcessGroup | None:
    """Form the groups along a dimension, in the same order on every rank; returns this rank's."""
    whole = resolve(None)
    own: ProcessGroup | None = None
    for line in np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim]).tolist():
        if tuple(line) == whole.ranks and backend in (None, whole.backend):
            return whole
        formed = form_group(whole.world, line, backend=backend, sort_ranks=False)
        own = formed if isinstance(formed, ProcessGroup) else own
    return own
