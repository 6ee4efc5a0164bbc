"""The error tree: every error is its fault's and also the built-in that users expect."""

from __future__ import annotations

import pytest

from rallypoint.base import errors


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (errors.AlreadyInitializedError, (RuntimeError, ValueError, errors.CallerError)),
        (errors.NotInitializedError, (RuntimeError, ValueError, errors.CallerError)),
        (errors.InvalidArgumentError, (ValueError, errors.CallerError)),
        (errors.InvalidTypeError, (TypeError, errors.CallerError)),
        (errors.PeerLostError, (RuntimeError, errors.PeerError)),
        (errors.CollectiveTimeoutError, (TimeoutError, errors.PeerError)),
        (errors.StoreConnectionError, (ConnectionError, errors.HostError)),
        (errors.StoreTimeoutError, (TimeoutError, errors.HostError)),
    ],
)
def test_error_is_what_users_expect(
    error: type[errors.RallypointError], bases: tuple[type[BaseException], ...]
) -> None:
    raised = error("what happened")
    assert str(raised) == "what happened"
    for base in (*bases, errors.RallypointError):
        assert isinstance(raised, base)


def test_attributes_name_the_culprit() -> None:
    lost = errors.PeerLostError("rank 3 died", rank=3, operation="all_reduce")
    assert (lost.rank, lost.operation) == (3, "all_reduce")
    gone = errors.StoreConnectionError("gone", endpoint="h:1", operation="get", key="k")
    assert (gone.endpoint, gone.operation, gone.key) == ("h:1", "get", "k")
