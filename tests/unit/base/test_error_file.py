"""What `record` writes where launchers look."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.base.error_file import record


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def raising(error: BaseException) -> Callable[[], None]:
    @record
    def train() -> None:
        """Train."""
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "told", "stack"),
    [
        (ValueError("too large"), "ValueError: too large", "in train"),
        (SystemExit("no data"), "SystemExit: no data", ""),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", "in train"),
    ],
)
def test_an_error_is_written_and_passes(
    place: Path, error: BaseException, told: str, stack: str
) -> None:
    with pytest.raises(type(error)) as raised:
        raising(error)()
    assert raised.value is error
    message = json.loads(place.read_text())["message"]
    assert message["message"] == told
    found = message["extraInfo"]["py_callstack"]
    assert stack in found
    assert bool(found) == bool(stack)


def already_written() -> BaseException:
    error = RuntimeError("workers failed")
    error.is_in_error_file = True  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), already_written()])
def test_what_is_no_news_is_not_written(place: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        raising(error)()
    assert not place.exists()


def test_a_file_that_cannot_be_written_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/none/error.json")
    with pytest.raises(ValueError, match="too large"):
        raising(ValueError("too large"))()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(ValueError, match="too large"):
        raising(ValueError("too large"))()


def test_the_function_is_otherwise_as_before() -> None:
    @record
    def add(one: int, *, other: int) -> int:
        return one + other

    assert (add(1, other=2), add.__name__) == (3, "add")
