"""Algorithms from a user's Python file: one function, proved before its programs may run.

    # two_way.py
    def two_way(team):                  # team.ranks, team.root, team.per_node
        return Program(...)

If a proof would take minutes because of many ranks, it covers the ranks that represent all others
if the program declares a `period`, and otherwise 1 to 16 ranks; `Custom.proof` says which. The name
of the algorithm gets a few digits of the file's hash, so that ranks with different versions of the
file get an error at the first message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.catalogue import Team
from rallypoint.schedule.program import SLOTS, Program, ProgramError

MOST_OPERATIONS = 200_000  # to be proved, in a few seconds
SMALL_RANKS = 16


@dataclass(slots=True)
class Custom:
    """A user's algorithm.

    Attributes:
        name: the function's name, and the first digits of the file's hash.
        function: what the file defines.
        proof: what was proved last, in words.
    """

    name: str
    path: str
    function: Callable[[Team], Program]
    proof: str = ""
    _known: dict[Team, Program] = field(default_factory=dict)

    def build(self, team: Team) -> Program:
        """The program for a team, proved once."""
        if team not in self._known:
            program = self._call(team)
            self._known[team] = replace(program, copies=self._prove(program, team))
        return self._known[team]

    def _prove(self, program: Program, team: Team) -> bool:
        """Prove the program; returns whether senders must copy what they send."""
        # Imported here so that users without their own algorithms do not pay for proofs.
        from rallypoint.schedule.proof.symmetry import find_rotation
        from rallypoint.schedule.proof.verify import operations_of, verify

        operations = operations_of(program)
        is_short = operations <= MOST_OPERATIONS * team.ranks and find_rotation(program) is not None
        if operations <= MOST_OPERATIONS or is_short:
            report = verify(program, slots=SLOTS, most=MOST_OPERATIONS)
            how = "" if report.proof == "all ranks" else f" ({report.proof})"
            self.proof = f"proved for {team.ranks} ranks{how}"
            return report.copies_in_place
        for ranks in range(1, SMALL_RANKS + 1):
            verify(self._call(Team(ranks, min(team.root, ranks - 1))), slots=SLOTS)
        self.proof = f"proved for 1 to {SMALL_RANKS} ranks, not for {team.ranks}"
        return True

    def _call(self, team: Team) -> Program:
        try:
            program = self.function(team)
        except ProgramError:
            raise
        except Exception as error:
            raise ProgramError(
                f"{self.path}: {self.name} failed for {team}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(program, Program) or program.ranks != team.ranks:
            raise ProgramError(
                f"{self.path}: {self.name} must return a Program for {team.ranks} ranks, "
                f"not {program!r}"
            )
        return replace(program, name=self.name, copies=True)


def load(spec: str) -> Custom:
    """Read an algorithm from ``FILE.py`` or ``FILE.py:FUNCTION``."""
    import hashlib
    import runpy

    path, _, name = spec.partition(":")
    try:
        code = Path(path).read_bytes()
        names = runpy.run_path(path)
    except Exception as error:
        raise InvalidArgumentError(
            f"cannot load an algorithm from {path}: {type(error).__name__}: {error}"
        ) from error
    own = {
        key: value
        for key, value in names.items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__globals__", {}).get("__file__") == path
    }
    if name and name not in own:
        raise InvalidArgumentError(f"{path} defines no function {name}")
    if not name and len(own) != 1:
        raise InvalidArgumentError(
            f"{path} defines {len(own)} public functions ({', '.join(own) or 'none'}); "
            f"name the one that makes the program: {path}:NAME"
        )
    name = name or next(iter(own))
    digest = hashlib.sha256(code).hexdigest()[:8]
    return Custom(f"{name}-{digest}", path, own[name])
