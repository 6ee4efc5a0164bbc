"""The template of one node, `run --preload`: starts it, tells what it finds, and replaces it.

base/template.py is the process; the guardian asks it for workers, and starts by exec what it does
not fork (native/guardian/template.h). So nothing here decides how a worker is started.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable

from rallypoint.base.control_message import PreloadReport
from rallypoint.base.template import PROGRAM
from rallypoint.launch.agent.guardian import Guardian, GuardianReport, ReportKind
from rallypoint.launch.agent.local_workers import AgentParts, ControlChannel
from rallypoint.launch.job import rank_variables, template_environ

NUMBER = (1 << 32) - 1  # by which the guardian knows it; no worker has this one
_IMPORT_S = 30  # native/guardian/template.cc, kImportMs
_MOST_REPLACED = 3
_TITLE_ROOM = 64  # for "[rank 3]", and an argument that differs by local rank
_ALONE = "each worker imports it itself"


class TemplateProcess:
    """The process, and those that replace it.

    Args:
        directory: the job's; its name is in the environment of all the job's processes.
        to_guardian: performs a request.
    """

    def __init__(
        self,
        parts: AgentParts,
        directory: str,
        to_guardian: Callable[[Callable[[Guardian], None]], None],
    ) -> None:
        self._job, self._selector, self._progress = parts.job, parts.selector, parts.progress
        self._directory, self._to_guardian = directory, to_guardian
        self._control = ControlChannel()
        self._module = ""  # that it imports
        self._is_ready = self._is_refused = False
        self._replaced = 0

    def start(self) -> None:
        """Ask the guardian for it. Workers that are asked for from now on wait for it."""
        job = self._job
        program, *words = job.command
        is_module = words[1] == "-m"
        path = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[1]))
        room = " " * (sum(len(os.fsencode(each)) + 1 for each in job.command) + _TITLE_ROOM)
        modules, watched = ",".join(job.preload), ",".join(rank_variables(job))
        error_file = f"{self._directory}/template/error.json" if self._directory else None
        self._selector.register(self._control, selectors.EVENT_READ, self._read)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            descriptors = (nothing, nothing, nothing, self._control.worker_fileno)
            argv = (program, "-u", "-c", PROGRAM, modules, watched, path, room)
            # OpenMP counts the CPUs when it is loaded; several workers have OMP_NUM_THREADS.
            cpus = job.cpus[0] if len(job.cpus) == 1 else frozenset[int]()
            environ = template_environ(job, error_file=error_file)
            self._to_guardian(
                lambda guardian: guardian.template(
                    NUMBER, argv, environ, descriptors=descriptors, cpus=cpus
                )
            )
        finally:
            os.close(nothing)
        self._control.started()

    def close(self) -> None:
        """It has ended, or will with the guardian."""
        self._forget()
        self._control.close()

    def is_about(self, report: GuardianReport) -> bool:
        """Whether that is a report on it."""
        return report.worker == NUMBER

    def reported(self, report: GuardianReport) -> None:
        """The guardian reports something of it."""
        self._read()
        if report.kind is ReportKind.LATE:
            if self._is_ready:
                text = "the process that forks workers does not answer; they are started without it"
            else:
                text = f"importing {self._module} takes longer than {_IMPORT_S} s; {_ALONE}"
            self._progress.preload(text, state="late", is_told=True)
        elif report.kind in (ReportKind.EXITED, ReportKind.SPAWN_FAILED):
            self._ended(report)

    def _ended(self, report: GuardianReport) -> None:
        self.close()
        if self._is_refused:
            return
        end = report.end_of(rank=-1, local_rank=0, program=sys.executable)
        if not self._is_ready:
            what = f"the process that imports {self._module}" if self._module else "the template"
            return self._progress.preload(
                f"{what} {end.what}; {_ALONE}", state="ended", is_told=True
            )
        self._replaced += 1
        text = f"the process that forks workers {end.what}"
        if self._replaced > _MOST_REPLACED:
            text += f", and was replaced {_MOST_REPLACED} times already; from now on, {_ALONE}"
            return self._progress.preload(text, state="ended", is_told=True)
        text += "; another one is started"
        self._progress.preload(text, state="replaced", is_told=False)
        self._control, self._module, self._is_ready = ControlChannel(), "", False
        return self.start()

    def _forget(self) -> None:
        is_closed = self._control.fileno() < 0
        if not is_closed and self._control in self._selector.get_map():
            self._selector.unregister(self._control)

    def _read(self) -> None:
        messages, is_open = self._control.receive()
        if not is_open:
            self._forget()
        for message in messages:
            if not isinstance(message, PreloadReport):
                continue
            self._module = message.module
            if message.because and not self._is_refused:
                self._is_refused = True
                text = f"{message.module} {message.because}; {_ALONE}"
                self._progress.preload(text, state="refused", is_told=True)
            elif message.is_ready:
                self._is_ready = True
                text = f"{', '.join(self._job.preload)} imported; workers are forked"
                self._progress.preload(text, state="ready", is_told=False)
