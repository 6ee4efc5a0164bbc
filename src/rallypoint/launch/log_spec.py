"""Where the workers' output goes: the user's options as frozen data, and their consequences.

`destination_of` is the one rule; output/ performs it. The layout of the files is torchrun's, and so
are the meanings of redirect, tee and filter. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

STDOUT, STDERR = 1, 2  # both the descriptors and the bits of torchrun's 0-3
NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Destination(Enum):
    """Where one stream of one worker goes."""

    INHERITED = "to the launcher's own stream, unchanged"
    PREFIXED = "to the launcher's own stream, line by line with a prefix"
    FILE = "to its file only"
    TEE = "to its file and, with a prefix, to the launcher's own stream"
    DROPPED = "nowhere"


class StreamMap(Record, kw_only=True):
    """Which streams of which local ranks: 0 none, 1 stdout, 2 stderr, 3 both."""

    of: Mapping[int, int] = MappingProxyType({})
    all_others: int = 0

    def __bool__(self) -> bool:
        return bool(self.all_others) or any(self.of.values())

    def has(self, local_rank: int, stream: int) -> bool:
        """Whether this stream is included."""
        return bool(self.of.get(local_rank, self.all_others) & stream)

    @classmethod
    def parse(cls, text: str) -> StreamMap:
        """``"3"``, or ``"0:1,1:3"`` for single local ranks."""
        if text in ("0", "1", "2", "3"):
            return cls(all_others=int(text))
        found: dict[int, int] = {}
        for item in text.split(","):
            rank, colon, streams = item.partition(":")
            is_rank = rank.isascii() and rank.isdigit() and len(rank) < 6
            if not (is_rank and colon and streams in ("0", "1", "2", "3")):
                raise InvalidArgumentError(
                    f"{text!r} does not name streams; give 0 (none), 1 (stdout), 2 (stderr) or 3 "
                    "(both), or one of these for each local rank, as in 0:3,1:2."
                )
            found[int(rank)] = int(streams)
        return cls(of=MappingProxyType(found))


class LogSpec(Record, kw_only=True):
    """All options of output.

    Attributes:
        directory: the parent of the job's own directory; None: a temporary one.
        shown: local ranks whose output may appear on the launcher's streams; None: all.
        filters: by stream, texts: teed lines that contain one are also written to one file for all
            workers.
        prefix: a format with {rank}, {local_rank}, {role} and {host} for each line that passes
            through the launcher; None: only teed lines get one, `tee_prefix`.
    """

    directory: str | None = None
    redirects: StreamMap = StreamMap()
    tee: StreamMap = StreamMap()
    shown: frozenset[int] | None = None
    filters: Mapping[int, tuple[str, ...]] = MappingProxyType({})
    prefix: str | None = None
    tee_prefix: str = "[{role}{local_rank}]:"

    def __post_init__(self) -> None:
        self.prefix_of(rank=0, local_rank=0, role="", host="")

    @property
    def are_kept(self) -> bool:
        """Whether files are left for the user."""
        filters = any(self.filters.values())
        return self.directory is not None or bool(self.redirects) or bool(self.tee) or filters

    @property
    def hides_output(self) -> bool:
        """Whether the terminal shows less than the workers write, or shows it with prefixes."""
        return bool(self.redirects) or bool(self.tee)

    def destination_of(self, local_rank: int, stream: int) -> Destination:
        """Where this stream goes."""
        is_shown = self.shown is None or local_rank in self.shown
        if self.tee.has(local_rank, stream):
            return Destination.TEE if is_shown else Destination.FILE
        if self.redirects.has(local_rank, stream):
            return Destination.FILE
        if not is_shown:
            return Destination.DROPPED
        return Destination.INHERITED if self.prefix is None else Destination.PREFIXED

    def passes_through(self, local_rank: int, stream: int) -> bool:
        """Whether the launcher itself writes what its own stream shows of this stream."""
        return self.destination_of(local_rank, stream) is not Destination.INHERITED

    def prefix_of(self, *, rank: int, local_rank: int, role: str, host: str) -> str:
        """The prefix of this worker's lines."""
        template = self.tee_prefix if self.prefix is None else self.prefix
        return format_prefix(template, rank=rank, local_rank=local_rank, role=role, host=host)


def format_prefix(template: str, *, rank: int, local_rank: int, role: str, host: str) -> str:
    """Fill in a log prefix."""
    try:
        return template.format(rank=rank, local_rank=local_rank, role=role, host=host)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        raise InvalidArgumentError(
            f"--log-prefix is {template!r}; it may use {{rank}}, {{local_rank}}, {{role}} and"
            " {host}, as in '{rank}: '."
        ) from None


def translate_template(template: str) -> str:
    """Torch's form of a prefix, with ${rank}, ${local_rank}, ${role_name}, ${hostname}, as ours."""
    from string import Template  # slow, and seldom needed

    names = {"rank": "rank", "local_rank": "local_rank", "role_name": "role", "hostname": "host"}
    marked = Template(template).safe_substitute({k: f"\0{v}\1" for k, v in names.items()})
    return marked.replace("{", "{{").replace("}", "}}").replace("\0", "{").replace("\1", "}")
