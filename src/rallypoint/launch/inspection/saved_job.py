"""What is saved of a job that failed, so that it can be explained afterwards: one small file.

    ${XDG_STATE_HOME:-~/.local/state}/rallypoint/PID.TIME.json        the latest twenty

It holds what the agent saw at the first sign of trouble, and how its workers ended. An agent that
was killed saves nothing, and each node saves only its own part.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import Explanation, Verdict
from rallypoint.diagnosis.facts import Facts
from rallypoint.launch.inspection.ended_job import newest_first, state_directory, stem_of
from rallypoint.launch.inspection.entries import shown_name

_SUFFIX = ".json"
_MOST_FILES = 20
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJob:
    """A job that has ended.

    Attributes:
        pid: its launcher's, here.
        ended: seconds since the epoch.
        status: the launcher's exit status.
        hang: the hang for which the launcher ended the job, as a sentence; empty if there was none.
        failure: the worker that failed first, and how; empty if none did.
        logs: the directory of its workers' output; empty if that was not kept.
    """

    run_id: str
    pid: int
    command: tuple[str, ...]
    ended: float
    status: int
    facts: Facts
    hang: str = ""
    failure: str = ""
    logs: str = ""

    @property
    def name(self) -> str:
        """The job's name as it is shown."""
        return shown_name(self.run_id, self.command)

    def explained(self) -> Explanation:
        """Why it failed."""
        why = explanation_of(self.facts, self.facts)
        if self.failure and why.kind is Verdict.NO_HANG:  # its calls do not show why
            why = replace(why, kind=Verdict.EXPLAINED, sentence=f"{self.failure}.")
        return why


def keep(job: KeptJob) -> None:
    """Save it; if there is no place for it, nothing is saved."""
    data = json.dumps(to_json(job))
    if len(data) > _MOST_BYTES:
        return
    try:
        directory = Path(state_directory())
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{stem_of(job.pid, job.ended)}{_SUFFIX}"
        path.with_suffix(".new").write_text(data)
        path.with_suffix(".new").rename(path)
        for _, _, old in newest_first(str(directory), _SUFFIX)[_MOST_FILES:]:
            os.unlink(old)
    except OSError:
        return


def kept_jobs() -> list[KeptJob]:
    """This user's failed jobs on this machine, latest first."""
    jobs = []
    try:
        found = newest_first(state_directory(), _SUFFIX)
    except OSError:
        return []
    for _, _, path in found:
        try:
            jobs.append(from_json(KeptJob, json.loads(Path(path).read_text())))
        except (OSError, ValueError, HostError):  # of another version, say
            continue
    return jobs


def latest_kept(word: str) -> KeptJob | None:
    """The job that failed last of those that `word` selects, as for running jobs; empty: of all."""
    for job in kept_jobs():
        if word in ("", str(job.pid)) or job.run_id.startswith(word) or job.name.startswith(word):
            return job
    return None
