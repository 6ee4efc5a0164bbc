"""The request to `rallypoint simulate`, read from its flags."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.cli.options import UsageError
from rallypoint.cli.quantities import doubling, size

PROGRAM = "rallypoint simulate"


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """One request."""

    collective: str
    ranks: list[int]
    nbytes: list[int]
    per_node: int | None
    algorithms: list[str]
    links: str
    variants: list[str]
    noise: float
    runs: int
    seed: int
    late_us: tuple[tuple[int, float], ...]
    slow: tuple[tuple[int, float], ...]
    failed: tuple[tuple[int, int], ...]
    retry_us: float


def request_of(collective: str, values: dict[str, str]) -> SimulationRequest:
    """Read the flags."""
    if not collective:
        raise UsageError(f"{PROGRAM}: name a collective, as in: {PROGRAM} all_reduce")
    ranks = _count("--ranks", values.get("--ranks", "8"))
    nbytes = size(PROGRAM, "--bytes", values.get("--bytes", "1M"))
    if "--sweep-ranks" in values and "--sweep-bytes" in values:
        raise UsageError(f"{PROGRAM}: --sweep-ranks and --sweep-bytes cannot be combined.")
    per_node = values.get("--ranks-per-node")
    return SimulationRequest(
        collective=collective,
        ranks=_sweep("--sweep-ranks", values.get("--sweep-ranks"), ranks),
        nbytes=_sweep("--sweep-bytes", values.get("--sweep-bytes"), nbytes),
        per_node=None if per_node is None else _count("--ranks-per-node", per_node),
        algorithms=_words(values.get("--algorithms")),
        links=values.get("--links", "hopper"),
        variants=_words(values.get("--variants")),
        noise=_number("--noise", values.get("--noise", "0")),
        runs=_count("--runs", values.get("--runs", "20")),
        seed=int(_number("--seed", values.get("--seed", "0"))),
        late_us=_pairs("--late", values.get("--late"), ":"),
        slow=_pairs("--slow", values.get("--slow"), ":"),
        failed=tuple((int(a), int(b)) for a, b in _pairs("--failed", values.get("--failed"), "-")),
        retry_us=_number("--retry-us", values.get("--retry-us", "1e6")),
    )


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"{PROGRAM}: {flag} {text} is not a number above 0.")
    return int(text)


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{PROGRAM}: {flag} {text} is not a number.") from None


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _sweep(flag: str, text: str | None, single: int) -> list[int]:
    return [single] if text is None else doubling(PROGRAM, flag, text)


def _pairs(flag: str, text: str | None, separator: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [word.split(separator) for word in _words(text)]
        return tuple((int(first), float(second)) for first, second in pairs)
    except ValueError:
        raise UsageError(f"{PROGRAM}: {flag} {text} is not A{separator}B.") from None
