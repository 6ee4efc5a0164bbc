"""Runs PyTorch's own tests of torch.distributed, bundled in its wheel, against a backend.

    python -m tests.system.torch_suite BACKEND WORLD_SIZE OUTCOMES.json [TEST ...]

Its tests ask whether the backend is one that PyTorch knows, and are told that it is gloo. The ranks
are forked: each test would otherwise import torch anew on each rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any


class Posing(str):
    """A backend's name that passes for gloo."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    __hash__ = str.__hash__


def load(backend: str, world_size: int) -> Any:
    """The suite's class of tests."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    import torch
    from torch.testing._internal.distributed import distributed_test

    tests: Any = distributed_test
    tests.BACKEND = Posing(backend)

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    # Where pickle and unittest look for it.
    Suite.__module__ = "__main__"
    Suite.__qualname__ = "Suite"
    return Suite


class Outcomes(unittest.TextTestResult):
    """What became of each test, and how long it took."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.by_test: dict[str, tuple[str, float]] = {}
        self._started = 0.0

    def startTest(self, test: Any) -> None:  # noqa: N802
        self._started = time.monotonic()
        super().startTest(test)

    def _note(self, test: Any, outcome: str) -> None:
        name = test.id().rpartition(".")[2]
        self.by_test[name] = (outcome, round(time.monotonic() - self._started, 2))

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._note(test, "passed")
        super().addSuccess(test)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped")
        super().addSkip(test, reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, "failed")
        super().addFailure(test, err)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, "failed")
        super().addError(test, err)


def main() -> None:
    backend, world_size, path, *words = sys.argv[1:]
    suite = load(backend, int(world_size))
    names = words or unittest.defaultTestLoader.getTestCaseNames(suite)
    tests = unittest.TestSuite(map(suite, names))
    outcomes = unittest.TextTestRunner(resultclass=Outcomes, verbosity=2).run(tests)
    assert isinstance(outcomes, Outcomes)
    Path(path).write_text(json.dumps(outcomes.by_test, indent=1))


if __name__ == "__main__":
    main()
