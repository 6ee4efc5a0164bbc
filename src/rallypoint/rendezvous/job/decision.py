"""What every pure state machine here returns for an event: what to do now, and why."""

from __future__ import annotations

from rallypoint.base.record import Record

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Generic, Never, NoReturn, TypeVar

    Action_co = TypeVar("Action_co", bound=Record, covariant=True)
    Other = TypeVar("Other", bound=Record)
else:
    Action_co = None

    class Generic:
        """A word to type checkers only."""

        __slots__ = ()

        def __class_getitem__(cls, _: object) -> type:
            return cls


class Decision(Record, Generic[Action_co]):
    """Actions for the driver, in this order; an empty reason: nothing worth reporting happened.

    `Action_co` is the union of what this state machine may ask for: its driver performs each.
    """

    actions: tuple[Action_co, ...] = ()
    reason: str = ""

    def __add__(self, then: Decision[Other]) -> Decision[Action_co | Other]:
        """Both, one after the other."""
        reasons = [text for text in (self.reason, then.reason) if text]
        return Decision(self.actions + then.actions, "; ".join(reasons))


NOTHING: Decision[Never] = Decision()


def assert_never(action: Never) -> NoReturn:
    """The last case of a driver: mypy accepts it only if each action, or order, has one."""
    raise AssertionError(f"nobody performs {action!r}")
