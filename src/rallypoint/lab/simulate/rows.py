"""The results of `rallypoint simulate` as rows, printed as a table, written as JSON, and drawn."""

from __future__ import annotations

import html
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.wording import table
from rallypoint.lab.figure import figure, logarithmic
from rallypoint.lab.quantities import bus_factor, human_bytes, human_time
from rallypoint.lab.simulate import SimulationRequest
from rallypoint.schedule.catalogue import ALGORITHMS, Team, build
from rallypoint.schedule.choose import is_file
from rallypoint.schedule.cost.links import LinkModel, read_model
from rallypoint.schedule.cost.simulation import Simulation
from rallypoint.schedule.cost.simulation.wave import CALM, Conditions
from rallypoint.schedule.custom import Custom, load
from rallypoint.schedule.program import Collective, Program, ProgramError

# The two algorithms whose times are shown side by side, with their ratio.
_SLOW, _FAST = "ring", "double_tree"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One prediction. `algbw` and `busbw` as nccl-tests define them."""

    collective: str
    algorithm: str
    variant: str
    ranks: int
    ranks_per_node: int
    bytes: int
    time_us: float
    p95_us: float | None  # with noise; time_us is then the median
    steps: int
    pieces: int
    busiest_link_bytes: float
    algbw_gb_s: float
    busbw_gb_s: float
    bound: str
    method: str


@dataclass(slots=True)
class Results:
    """Rows, and the notes that belong to them."""

    model: LinkModel
    rows: list[Prediction]
    notes: list[str]


def rows_of(request: SimulationRequest) -> Results:
    """Simulate everything that was requested."""
    model = read_model(request.links)
    results = Results(model, [], [])
    collective = collective_of(request.collective)
    variants = request.variants or list(model.variants)
    for variant in variants:
        if variant not in model.variants:
            raise InvalidArgumentError(
                f"{model.name} has no variant {variant!r}; it has {', '.join(model.variants)}"
            )
    for name in request.algorithms or list(ALGORITHMS[collective]):
        custom = load(name) if is_file(name) else None
        if custom is None and name not in ALGORITHMS[collective]:
            raise InvalidArgumentError(
                f"{request.collective} has no algorithm {name!r}; it has "
                f"{', '.join(ALGORITHMS[collective])}, or a file: my_algorithm.py"
            )
        for ranks in request.ranks:
            per_node = min(request.per_node or model.per_node, ranks)
            try:
                program = program_of(collective, custom or name, Team(ranks, 0, per_node))
                results.rows += _rows(request, model, program, variants, per_node)
            except (InvalidArgumentError, ProgramError) as error:
                if custom is not None or request.algorithms:
                    raise
                results.notes.append(f"left out: {error}")
        if custom is not None:
            results.notes.append(f"{custom.name}: {custom.proof}")
    return results


def collective_of(name: str) -> Collective:
    """A collective by its name."""
    known = [each for each in Collective if each is not Collective.SEND]
    for each in known:
        if each.operation == name:
            return each
    names = ", ".join(each.operation for each in known)
    raise InvalidArgumentError(f"unknown collective {name!r}; choose one of {names}")


def program_of(collective: Collective, algorithm: str | Custom, team: Team) -> Program:
    """The program of a built-in or custom algorithm."""
    if isinstance(algorithm, str):
        return build(
            collective, algorithm, ranks=team.ranks, root=team.root, per_node=team.per_node
        )
    program = algorithm.build(team)
    if program.collective is not collective:
        raise InvalidArgumentError(
            f"{algorithm.path} is for {program.collective.operation}, "
            f"not for {collective.operation}"
        )
    return program


def _rows(
    request: SimulationRequest,
    model: LinkModel,
    program: Program,
    variants: Sequence[str],
    per_node: int,
) -> Iterator[Prediction]:
    simulation: Simulation | None = None
    for variant in variants:
        links = model.links(variant, program.name).on(per_node)
        simulation = Simulation(program, links, twin=simulation)
        for nbytes in request.nbytes:
            yield _row(request, simulation, variant, nbytes, per_node)


def _row(
    request: SimulationRequest, simulation: Simulation, variant: str, nbytes: int, per_node: int
) -> Prediction:
    program = simulation.program
    block = block_bytes(program.collective, nbytes, program.ranks)
    conditions = Conditions(
        noise=request.noise,
        late_us=request.late_us,
        slow=request.slow,
        failed=request.failed,
        retry_us=request.retry_us,
        seed=request.seed,
    )
    outcome = simulation.run(block, conditions if conditions.is_disturbed else CALM)
    time_us, p95_us = outcome.time_us, None
    if request.noise:
        times = sorted(
            simulation.run(block, conditions.with_seed(request.seed + run)).time_us
            for run in range(request.runs)
        )
        time_us, p95_us = statistics.median(times), times[math.ceil(0.95 * len(times)) - 1]
    algbw = nbytes / time_us / 1e3 if time_us else 0.0
    return Prediction(
        program.collective.operation,
        program.name,
        variant,
        program.ranks,
        per_node,
        nbytes,
        time_us,
        p95_us,
        outcome.steps,
        outcome.pieces,
        outcome.busiest_link_bytes,
        algbw,
        algbw * bus_factor(program.collective, program.ranks),
        outcome.bound,
        outcome.method,
    )


def block_bytes(collective: Collective, nbytes: int, ranks: int) -> float:
    """Convert the size of the larger buffer, as nccl-tests count it, to the block size that a
    simulation takes.
    """
    if collective is Collective.ALL_TO_ALL or collective is Collective.BARRIER:
        return 0 if collective is Collective.BARRIER else nbytes
    return nbytes / collective.most_blocks(ranks)


def show_fastest(request: SimulationRequest) -> None:
    """Print the five fastest algorithms, each with its fastest variant, and one sentence."""
    results = rows_of(request)
    by_algorithm: dict[str, Prediction] = {}
    for row in sorted(results.rows, key=lambda row: row.time_us):
        by_algorithm.setdefault(row.algorithm, row)
    _print_table(list(by_algorithm.values())[:5])
    print(
        f"The five fastest algorithms for {request.collective} of"
        f" {human_bytes(request.nbytes[0])} among {request.ranks[0]} ranks, predicted with the"
        f" constants of {results.model.name}; see `rallypoint simulate --help`."
    )


def show(request: SimulationRequest, results: Results) -> None:
    """Print the table and its notes."""
    _print_table(results.rows)
    for text in (*_ratios(results), *results.notes):
        print(text)
    model = results.model
    print(f"Predicted, not measured, with the constants of {model.name} ({model.source}).")
    if model.measured_ranks and max(request.ranks) > model.measured_ranks:
        print(f"Extrapolated: the constants were measured with up to {model.measured_ranks} ranks.")
    sys.stdout.flush()


def _print_table(rows: Sequence[Prediction]) -> None:
    variants = any(row.variant for row in rows)
    noisy = any(row.p95_us is not None for row in rows)
    columns = ["algorithm", *(["variant"] if variants else []), "ranks", "bytes"]
    columns += ["median" if noisy else "time", *(["p95"] if noisy else [])]
    columns += ["steps", "busiest link", "algbw GB/s", "busbw GB/s", "bound"]
    lines = []
    for row in rows:
        cells = [row.algorithm, *([row.variant] if variants else []), str(row.ranks)]
        cells += [human_bytes(row.bytes), human_time(row.time_us)]
        cells += [human_time(row.p95_us)] if row.p95_us is not None else []
        cells += [str(row.steps), human_bytes(row.busiest_link_bytes)]
        cells += [f"{row.algbw_gb_s:.4g}", f"{row.busbw_gb_s:.4g}", row.bound]
        lines.append(cells)
    print(*table(columns, lines, right=" ".ljust(len(columns), "r")), "", sep="\n")


def _ratios(results: Results) -> Iterator[str]:
    """How much faster the double tree is than the ring, beside published measurements."""
    times = {
        (row.algorithm, row.variant, row.ranks, row.bytes): row.time_us for row in results.rows
    }
    shown = False
    for (algorithm, variant, ranks, nbytes), time_us in times.items():
        slow = times.get((_SLOW, variant, ranks, nbytes))
        if algorithm == _FAST and slow is not None and len(results.rows) <= 12:
            where = f" with {variant}" if variant else ""
            yield f"{_FAST} takes 1/{slow / time_us:.4g} of the time of {_SLOW}{where}."
            shown = True
    if shown and results.model.note:
        yield results.model.note


def write_json(path: str, request: SimulationRequest, results: Results) -> None:
    """Write all results as JSON."""
    data = {
        "request": asdict(request),
        "links": {"name": results.model.name, "source": results.model.source},
        "notes": results.notes,
        "rows": [asdict(row) for row in results.rows],
    }
    Path(path).write_text(json.dumps(data, indent=2) + "\n")
    print(f"written to {path}")


def plot(path: str, request: SimulationRequest, results: Results) -> None:
    """Draw time over size or over ranks; raises InvalidArgumentError as `figure` does."""
    over_ranks = len(request.ranks) > 1
    lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in results.rows:
        name = f"{row.algorithm} {row.variant}".strip()
        lines[name].append((row.ranks if over_ranks else row.bytes, row.time_us))
    what = f"{human_bytes(request.nbytes[0])}" if over_ranks else f"{request.ranks[0]} ranks"
    title = f"{request.collective}, {what}, predicted from {results.model.name}"
    with figure(path, title, _below(results)) as axes:
        for number, (name, points) in enumerate(lines.items()):
            style = ("-", "--", ":", "-.")[number // 10 % 4]
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        axes.set_ylabel("predicted time")
        logarithmic(axes, over_bytes=not over_ranks)


def _below(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(row.algorithm)}<td>{html.escape(row.variant)}<td>{row.ranks}"
        f"<td>{human_bytes(row.bytes)}<td>{human_time(row.time_us)}<td>{row.steps}"
        f"<td>{row.busbw_gb_s:.4g}"
        for row in results.rows
    )
    return (
        f"<table><tr><th>algorithm<th>variant<th>ranks<th>size<th>time<th>steps<th>busbw GB/s{rows}"
        f"</table><p>Constants: {html.escape(results.model.source)}. "
        f"{html.escape(results.model.note)}"
    )
