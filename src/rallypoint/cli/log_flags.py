"""Reads from the flags where the workers' output goes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.number_flags import is_whole
from rallypoint.cli.options import UsageError
from rallypoint.launch.log_spec import STDERR, STDOUT, LogSpec, StreamMap, translate_template

PROGRAM = "rallypoint run"
# The variable that torchrun reads if --log-line-prefix-template is not given.
TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def read_logs(values: Mapping[str, str], environ: Mapping[str, str]) -> LogSpec:
    """Read the flags.

    Raises:
        UsageError: the flags are malformed.
    """
    if values.get("--logs-specs", "default") != "default":
        raise UsageError(
            f"{PROGRAM}: --logs-specs {values['--logs-specs']}: only 'default' is accepted; leave "
            "it out, and configure the logs with --log-dir, --redirects, --tee and --log-prefix."
        )
    filters = {
        STDOUT: read_texts(values.get("--duplicate-stdout-filters")),
        STDERR: read_texts(values.get("--duplicate-stderr-filters")),
    }
    template = values.get("--log-line-prefix-template") or environ.get(TEMPLATE)
    return LogSpec(
        directory=values.get("--log-dir"),
        redirects=_streams(values, "--redirects"),
        tee=_streams(values, "--tee"),
        shown=_ranks(values.get("--local-ranks-filter", "")),
        filters=MappingProxyType({stream: texts for stream, texts in filters.items() if texts}),
        prefix=values.get("--log-prefix"),
        **({"tee_prefix": translate_template(template)} if template else {}),
    )


def notes_of(logs: LogSpec) -> list[str]:
    """Notes on flags that have no effect."""
    if logs.filters and not logs.tee:
        return ["--duplicate-*-filters apply only to teed lines, and --tee names none"]
    return []


def read_texts(text: str | None) -> tuple[str, ...]:
    """``"a,b"`` as two texts; a double comma is one comma in a text."""
    if text is None:
        return ()
    parts = [part.split(",") for part in text.split(",,")]
    found = parts[0]
    for part in parts[1:]:
        found = [*found[:-1], f"{found[-1]},{part[0]}", *part[1:]]
    return tuple(found)


def _streams(values: Mapping[str, str], name: str) -> StreamMap:
    try:
        return StreamMap.parse(values.get(name, "0"))
    except InvalidArgumentError as error:
        raise UsageError(f"{PROGRAM}: {name}: {error}") from None


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    if not all(is_whole(name) for name in names):
        raise UsageError(
            f"{PROGRAM}: --local-ranks-filter is {text!r}; it must be local ranks, as in 0,1."
        )
    return frozenset(map(int, names))
