"""The environment variables from which a worker reads its rank: torchrun's contract.

The launcher writes them (`to_environ`) and the process group reads them (`from_environ`), under
torchrun as well and under any launcher that sets at least RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Pure: the environment is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Any

SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # the signals that ask a launcher to end the job
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # in seconds, as --shutdown-timeout
SHUTDOWN_TIMEOUT_S = 30.0
HANG_AFTER = "RALLYPOINT_HANG_AFTER"  # in seconds, as --hang-after; 0: hangs are not reported
HANG_AFTER_S = 30.0  # without --hang-after, and ...
HANG_TIMES_USUAL = 2.0  # ... so many times the second longest wait of the group so far
SILENCE = "RALLYPOINT_SILENCE"  # in seconds, for which another host may be silent: `read_silence`
SILENCE_S = 5
MOST_SILENCE_S = 3600
LOCAL_ADDR = "RALLYPOINT_LOCAL_ADDR"  # as --local-addr, if that was given and there are more nodes
STANDBY = "RALLYPOINT_STANDBY"  # "1": the worker gets its place later (control_link.py)
AS_GLOO = "RALLYPOINT_AS_GLOO"  # "1": PyTorch's groups of gloo are ours (pytorch/as_gloo.py)
ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # without which `env://` fails


def is_env_given(environ: Mapping[str, str], *, rank: int = -1, world_size: int = -1) -> bool:
    """Whether ``env://`` has all it needs: variables, or the caller's arguments (-1: not given)."""
    given = {"RANK": rank >= 0, "WORLD_SIZE": world_size >= 0}
    return all(given.get(name) or environ.get(name) for name in ENV)


def read_silence(environ: Mapping[str, str]) -> int:
    """After how many seconds connections end with a host that does not answer."""
    text = environ.get(SILENCE) or str(SILENCE_S)
    try:
        found = math.ceil(float(text))
    except (ValueError, OverflowError):
        found = 0
    if not 1 <= found <= MOST_SILENCE_S:
        raise InvalidArgumentError(
            f"{SILENCE} is {text!r} in the environment; it must be a number of seconds from 1 to"
            f" {MOST_SILENCE_S}."
        )
    return found


class WorkerEnv(Record, kw_only=True):
    """A worker's rank and sizes, and the address of its store.

    Values that only some launchers set (the node-local numbers, the run id) are None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    role_name: str | None = None
    role_rank: int | None = None
    role_world_size: int | None = None
    master_addr: str
    master_port: int
    restart_count: int = 0
    max_restarts: int = 0
    run_id: str | None = None
    # True: the launcher hosts the store at master_addr:master_port; False: rank 0 must.
    use_agent_store: bool = False
    error_file: str | None = None

    def __post_init__(self) -> None:
        _check_rank("RANK", self.rank, "WORLD_SIZE", self.world_size)
        _check_rank("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        _check_rank("GROUP_RANK", self.group_rank, "GROUP_WORLD_SIZE", self.group_world_size)
        _check_rank("ROLE_RANK", self.role_rank, "ROLE_WORLD_SIZE", self.role_world_size)
        if not self.master_addr:
            raise InvalidArgumentError("MASTER_ADDR is empty; set it to the host of rank 0.")
        if not 0 < self.master_port < 65536:
            raise InvalidArgumentError(
                f"MASTER_PORT is {self.master_port}; set it to a port from 1 to 65535."
            )

    def to_environ(self) -> dict[str, str]:
        """The variables to set; what is None is left out."""
        values = {name: getattr(self, field) for name, field in _FIELDS.items()}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> WorkerEnv:
        """Read the variables; an empty number counts as not set."""
        missing = [name for name in ENV if not environ.get(name)]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise InvalidArgumentError(
                f"{', '.join(missing)} {verb} not set in the environment; start the program with"
                " `rallypoint run` (or another launcher), or set"
                " RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
        values: dict[str, Any] = {}
        for name, field in _FIELDS.items():
            hint = cls.__annotations__[field]
            if environ.get(name) or ("str" in hint and name in environ):
                values[field] = _read(name, environ[name], hint)
        return cls(**values)


# The variables with a prefix; the others are called like their fields: RANK.
_TORCHELASTICS = {
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "max_restarts": "TORCHELASTIC_MAX_RESTARTS",
    "run_id": "TORCHELASTIC_RUN_ID",
    "use_agent_store": "TORCHELASTIC_USE_AGENT_STORE",
    "error_file": "TORCHELASTIC_ERROR_FILE",
}
_FIELDS = {_TORCHELASTICS.get(field, field.upper()): field for field in WorkerEnv._fields}
VARIABLES = tuple(_FIELDS)


def _read(name: str, text: str, hint: str) -> object:
    """The value of a variable, by the annotation of its field."""
    if "str" in hint:
        return text
    if hint == "bool":
        return text == "True"  # torch compares with exactly that, too
    # int() would also take "1_0", " 1" and other digits than ours.
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise InvalidArgumentError(
            f"{name} is {text!r} in the environment; it must be a whole number."
        )
    return int(text)


def _check_rank(rank_name: str, rank: int | None, size_name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise InvalidArgumentError(f"{size_name} is {size}; it must be at least 1.")
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        limit = "0 or more" if size is None else f"from 0 to {size - 1} ({size_name} is {size})"
        raise InvalidArgumentError(f"{rank_name} is {rank}; it must be {limit}.")
