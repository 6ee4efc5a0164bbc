"""Reports a job's progress to Kubeflow Trainer as the status of its TrainJob, beside the launcher.

Trainer 2.2 and later names a server to the pods of a TrainJob, if its feature gate TrainJobStatus
is on (KEP-2779). A status replaces the one before, hence only the node with node rank 0 reports;
and by default only programs that call `rallypoint.progress`, because transformers reports by
itself. All jobs of a cluster share a small budget of requests. Whatever the server answers, the job
continues. docs/decisions/126-kubeflow.md
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rallypoint.base.errors import HostError
from rallypoint.base.record import Record
from rallypoint.base.wording import one_line
from rallypoint.cli.flags import PROGRAM
from rallypoint.diagnosis.job_view import JobView, view_of
from rallypoint.launch.inspection.agent_client import AgentConnection
from rallypoint.launch.inspection.entries import running_agents
from rallypoint.launch.inspection.job_follower import JobFollower
from rallypoint.launch.inspection.node_reader import read_agents_node

LEAST_S, TIMEOUT_S = 5.0, 5.0  # between two requests; for each of them
_EVERY_S = 30.0
_MOST_INTEGER = 2**31 - 1
_MOST_OF_ANSWER, _MOST_OF_REASON = 16 << 10, 200
_REASONS = {403: "it refuses the token of this job", 404: "it knows no such TrainJob"}


class Problem(Record):
    """Why a status was not taken; `kind` is the same for the same reason."""

    kind: str
    text: str


class StatusServer(Record):
    """Where a TrainJob's status goes. Kubernetes renews both files."""

    url: str
    ca_file: str
    token_file: str

    def post(self, body: bytes) -> Problem | None:
        """Send a status, which takes at most TIMEOUT_S; only for the main thread."""

        def give_up(*_: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        where = self.url
        try:
            url = urlsplit(self.url)
            where = f"{url.hostname}:{url.port or 443}"
            return self._post(url, body)
        except TimeoutError:
            return Problem("timeout", f"{where} has not answered for {TIMEOUT_S:g} s")
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason
            return Problem("tls", f"no secure connection to {where}: {why}")
        except OSError as error:
            return Problem("system", f"{error.filename or where}: {error.strerror or error}")
        except (http.client.HTTPException, ValueError) as error:  # its text may have the token
            return Problem("http", f"{where}: {type(error).__name__}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _post(self, url: SplitResult, body: bytes) -> Problem | None:
        if url.scheme != "https":
            return Problem("url", f"{self.url} is no URL of https")
        token = Path(self.token_file).read_text(encoding="ascii").strip()
        context = ssl.create_default_context(cafile=self.ca_file)
        connection = http.client.HTTPSConnection(url.hostname or "", url.port, context=context)
        target = urlunsplit(("", "", url.path, url.query, ""))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", target, body, headers)
            answer = connection.getresponse()
            said = answer.read(_MOST_OF_ANSWER)
        finally:
            connection.close()
        if answer.status == HTTPStatus.OK:
            return None
        try:
            message = f": {json.loads(said)['message']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            message = ""
        reason = _REASONS.get(answer.status, "it does not take the status")
        text = f"{url.hostname} answers {answer.status}, {reason}{message}"
        return Problem(str(answer.status), text)


def train_job_status(view: JobView, at_s: float, exit_status: int | None = None) -> bytes:
    """The body of a request.

    A record has at most 16 values, with short names: far fewer metrics than the server takes.

    Args:
        at_s: the time since 1970.
        exit_status: of the launcher; None: the job runs. Only one that succeeded has 100 %.
    """
    status: dict[str, object] = {}
    if exit_status == 0:
        status = {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    else:
        if view.percent is not None:
            status["progressPercentage"] = min(99, view.percent)
        if view.left_s is not None and exit_status is None:
            status["estimatedRemainingSeconds"] = max(0, min(_MOST_INTEGER, view.left_s))
    slow = max(
        (each for each in view.ranks if each.is_slow),
        key=lambda each: each.late_share or 0.0,
        default=None,
    )
    metrics = {
        "rounds": str(view.round + 1),
        "losses": str(view.losses),
        "restarts": str(view.restarts),
        "stalled": str(int(view.is_stalled and exit_status is None)),
        **({} if slow is None else {"rank_last": str(slow.rank)}),
        **({} if view.step is None else {"step": str(view.step)}),
        **view.values,
    }
    status["metrics"] = [{"name": name, "value": value} for name, value in metrics.items() if name]
    now = datetime.fromtimestamp(int(at_s), UTC)
    status["lastUpdatedTime"] = now.isoformat().replace("+00:00", "Z")
    return json.dumps({"trainerStatus": status}).encode()


class Reporter:
    """Decides when to send a status, and says of each kind of problem once that there is one."""

    def __init__(self, post: Callable[[bytes], Problem | None]) -> None:
        self._post = post
        self._sent_at = float("-inf")
        self._sent: tuple[int | None, int] | None = None  # per cent, and round
        self._told: set[str] = set()

    def report(self, view: JobView, now: float, at_s: float) -> None:
        """Send the status of a job that runs, if that is due."""
        news = (view.percent, view.round)
        is_new = self._sent not in (None, news)
        if now - self._sent_at >= (LEAST_S if is_new else _EVERY_S):
            self._sent = news if self._send(train_job_status(view, at_s), now) else None

    def conclude(self, view: JobView, exit_status: int) -> None:
        """Send the last status, as soon as it may be sent."""
        time.sleep(max(0.0, self._sent_at + LEAST_S - time.monotonic()))
        self._send(train_job_status(view, time.time(), exit_status), time.monotonic())

    def _send(self, body: bytes, now: float) -> bool:
        self._sent_at = now
        problem = self._post(body)
        if problem is not None and problem.kind not in self._told:
            self._told.add(problem.kind)
            text = "Kubeflow does not learn this job's progress, but the job continues"
            reason = one_line(problem.text)[:_MOST_OF_REASON]
            with suppress(OSError):
                print(f"{PROGRAM}: {text}: {reason}", file=sys.stderr, flush=True)
        return problem is None


def report_job(pid: int, reporter: Reporter, *, always: bool) -> None:
    """Report the job of this launcher until standard input ends.

    Its agent is asked once a second how far its node is, which costs it a fifth of a millisecond;
    the job is followed only while there is something to report.

    Args:
        always: also a program that does not call `rallypoint.progress` on this node.
    """
    follower: JobFollower | None = None
    view: JobView | None = None
    view_at = 0.0
    while not select.select([0], [], [], 1.0)[0]:
        agents = [each for each in running_agents() if each.pid == pid]
        with suppress(HostError):  # it may have just ended, or be busy
            if follower is not None:
                follower.poll()
            if not agents or (follower is not None and time.monotonic() < view_at):
                continue
            with AgentConnection.at(agents[0]) as agent:
                node = read_agents_node(agent)
            always = always or (node.steps is not None and node.steps.source == "program")
            if node.node_rank == 0 and always:
                follower = follower or JobFollower(agents)
                view = view_of(follower.history()) or view
                if view is not None:
                    view_at = time.monotonic() + LEAST_S
                    reporter.report(view, time.monotonic(), time.time())
            elif follower is not None:  # in this round, another node reports
                follower.close()
                follower, view = None, None
    exit_status = os.read(0, 16)
    if exit_status and follower is not None:
        view = view_of(follower.history()) or view
    if exit_status and view is not None:
        reporter.conclude(view, int(exit_status))


if __name__ == "__main__":
    launcher, when, *server = sys.argv[1:]
    report_job(int(launcher), Reporter(StatusServer(*server).post), always=when == "on")
