"""What `dir` and completion in an interpreter show."""

from __future__ import annotations

from rallypoint import elastic


def test_only_public_names_are_listed() -> None:
    assert dir(elastic) == elastic.__all__
    assert all(hasattr(elastic, name) for name in elastic.__all__)
