"""The current activity of a rank, from the frames of its threads and from the kernel.

A C function has no frame: `time.sleep(9)` shows as the line that calls it. The kernel knows what
the thread does there: its system call, and whether it uses its core.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from itertools import chain

from rallypoint.diagnosis.explanation import Strength
from rallypoint.diagnosis.facts import Frame, Process, Stack, WorkerFacts


class ActivityKind(Enum):
    """Kinds of activity."""

    COLLECTIVE = "collective"
    TRANSFER = "send or receive"
    CALLS = "calls"  # waits for calls of any kind: in a work's wait, or in the backward pass
    INIT = "init"
    STORE = "store"
    LOADER = "loader"
    QUEUE = "queue"
    LOCK = "lock"
    FILE = "file"
    CHECKPOINT = "checkpoint"
    SOCKET = "socket"
    SLEEP = "sleep"
    IMPORT = "import"
    SUBPROCESS = "subprocess"
    COMPILE = "compile"
    GPU = "gpu"
    GARBAGE = "garbage"
    PROMPT = "prompt"  # it waits for input by a person
    RUNS = "runs"
    C_CODE = "C code"  # waits in C code, for an unknown reason
    UNKNOWN = "unknown"

    @property
    def is_idle(self) -> bool:
        """Whether it needs no core: it waits for a time, a person, a thread or a process."""
        return self in (
            ActivityKind.SLEEP,
            ActivityKind.PROMPT,
            ActivityKind.LOCK,
            ActivityKind.QUEUE,
            ActivityKind.SUBPROCESS,
            ActivityKind.SOCKET,
            ActivityKind.STORE,
        )

    @property
    def communicates(self) -> bool:
        """Whether it waits for other ranks, as far as its calls show."""
        return self in (
            ActivityKind.COLLECTIVE,
            ActivityKind.TRANSFER,
            ActivityKind.CALLS,
            ActivityKind.INIT,
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a rank, or of one of its threads.

    Attributes:
        words: a predicate, which is followed by "at FILE:LINE": ``"is in time.sleep"``.
        frame: the innermost line of the user's program, if known.
        note: a remark in brackets after the line.
        waits_in: the name of the library call that it waits in: ``"all_reduce"``, ``"backward"``.
    """

    kind: ActivityKind
    words: str
    frame: Frame | None = None
    _: KW_ONLY
    note: str = ""
    waits_in: str = ""
    strength: Strength = Strength.CERTAIN

    @property
    def site(self) -> str:
        """The user's line: ``"train.py:31"``, or empty."""
        return short_site(f"{self.frame.file}:{self.frame.line}") if self.frame else ""

    def __str__(self) -> str:
        site = f" at {self.site}" if self.site else ""
        return f"{self.words}{site}{f' ({self.note})' if self.note else ''}"


def short_site(site: str) -> str:
    """The line without the directory."""
    return site.rpartition("/")[2]


_NOT_THE_USERS = re.compile(
    r"^<frozen |/(site|dist)-packages/|(^|/)lib(64)?/python3(\.\d+)?t?/|python3\d+\.zip/"
    r"|(^|/)rallypoint/(base|engine|launch|process_group|pytorch|rendezvous|store)/"
    r"|(^|/)torch/(distributed|autograd|nn|utils|optim|cuda|multiprocessing|_\w+)/"
    r"|(^|/)torch/(_tensor|_ops|serialization)\.py$"
)
_STANDARD = re.compile(r"^<frozen |(^|/)lib(64)?/python3(\.\d+)?t?/(?!(site|dist)-packages)")

WAITS_FOR_LOCK = "waits for a lock in its own process"

_C10D = "torch/distributed/distributed_c10d.py"

# What a frame shows about its thread: the end of the file's path, the function (empty: any), and
# the activity. If several frames above the user's line match, the outermost one counts.
_FRAMES: tuple[tuple[str, str, ActivityKind, str], ...] = (
    (_C10D, "init_process_group|new_group|new_subgroups.*|split_group|_new_process_group_helper",
     ActivityKind.INIT, "waits in {}"),
    (_C10D, "destroy_process_group", ActivityKind.C_CODE, "is in {}"),
    (_C10D, "i?(send|recv)|(send|recv)_object_list|batch_isend_irecv", ActivityKind.TRANSFER,
     "waits in {}"),
    (_C10D, "[a-z].*", ActivityKind.COLLECTIVE, "waits in {}"),
    ("torch/distributed/rendezvous.py", "", ActivityKind.INIT, "waits in the rendezvous"),
    ("torch/distributed/_functional_collectives.py", "wait_tensor|_maybe_wrap_tensor|wait"
     "|trigger_wait", ActivityKind.CALLS, "waits for a collective"),
    ("rallypoint/process_group/formation/opening.py", "destroy_process_group", ActivityKind.C_CODE,
     "is in {}"),
    ("rallypoint/process_group/formation/opening.py", "(init|form)_process_group",
     ActivityKind.INIT, "waits in {}"),
    ("rallypoint/process_group/formation/subgroups.py", "", ActivityKind.INIT, "waits in {}"),
    ("rallypoint/process_group/calls/point_to_point.py", "[a-z].*", ActivityKind.TRANSFER,
     "waits in {}"),
    ("rallypoint/process_group/calls/(?!call)\\w+.py", "[a-z].*", ActivityKind.COLLECTIVE,
     "waits in {}"),
    ("rallypoint/process_group/work.py", "wait.*", ActivityKind.CALLS, "waits for a call"),
    ("rallypoint/pytorch/torch_work.py", "wait", ActivityKind.CALLS, "waits for a call"),
    ("rallypoint/store/\\w+.py", "[a-z].*", ActivityKind.STORE, "waits for a key of the store"),
    ("torch/autograd/graph.py", "_engine_run_backward", ActivityKind.CALLS, "is in backward"),
    ("torch/nn/parallel/distributed.py", "", ActivityKind.CALLS, "is in DistributedDataParallel"),
    ("torch/utils/data/dataloader.py", "", ActivityKind.LOADER, "waits for its data loader"),
    ("torch/serialization.py", "save", ActivityKind.CHECKPOINT, "is in torch.save"),
    ("torch/serialization.py", "load", ActivityKind.CHECKPOINT, "is in torch.load"),
    ("torch/distributed/checkpoint/.*.py", "", ActivityKind.CHECKPOINT, "is in a checkpoint"),
    ("torch/_(inductor|dynamo)/.*.py", "compile\\w*|_compile\\w*|codegen\\w*", ActivityKind.COMPILE,
     "compiles with torch.compile"),
    ("/(bdb|pdb|pudb/.*|ipdb/.*|debugpy/.*).py", "", ActivityKind.PROMPT,
     "is at a debugger's prompt"),
    ("/code.py", "interact", ActivityKind.PROMPT, "is at a prompt"),
    ("/IPython/terminal/\\w+.py", "", ActivityKind.PROMPT, "is at a prompt"),
    ("torch/cuda/__init__.py", "synchronize", ActivityKind.GPU, "waits for its GPU"),
    ("torch/cuda/streams.py", "synchronize|wait", ActivityKind.GPU, "waits for its GPU"),
    ("/subprocess.py", "", ActivityKind.SUBPROCESS, "waits for a process that it started"),
    ("/multiprocessing/process.py", "join", ActivityKind.SUBPROCESS,
     "waits for a process that it started"),
    ("/multiprocessing/queues.py", "get|put", ActivityKind.QUEUE,
     "waits for a queue between processes"),
    ("/multiprocessing/(connection|synchronize).py", "", ActivityKind.QUEUE,
     "waits for another of its processes"),
    ("/queue.py", "get|put|join", ActivityKind.QUEUE, "waits for a queue in its own process"),
    ("/threading.py", "join|_wait_for_tstate_lock", ActivityKind.LOCK,
     "waits for one of its threads"),
    ("/threading.py", "wait|wait_for|acquire|__enter__", ActivityKind.LOCK, WAITS_FOR_LOCK),
    ("/concurrent/futures/\\w+.py", "", ActivityKind.LOCK, "waits for one of its threads"),
    ("/(socket|ssl|http/client|urllib/request|selectors|asyncio/\\w+).py", "", ActivityKind.SOCKET,
     "waits for a connection"),
)  # fmt: skip
_TABLE = tuple(
    (
        re.compile(f"(^|/){file.removeprefix('/')}$".replace(".py", r"\.py")),
        re.compile(function or ".*"),
        kind,
        words,
    )
    for file, function, kind, words in _FRAMES
)

# The activity of a thread in a system call, below a line of the user's own.
_OF_CALLS = (
    ("clock_nanosleep nanosleep", ActivityKind.SLEEP, "is in time.sleep"),
    ("wait4 waitid vfork", ActivityKind.SUBPROCESS, "waits for a process that it started"),
    ("recvfrom recvmsg recv sendto sendmsg accept accept4 connect poll ppoll select pselect6 "
     "epoll_wait epoll_pwait", ActivityKind.SOCKET, "waits for a connection"),
    ("read pread64 readv write pwrite64 writev open openat close fsync fdatasync stat newfstatat "
     "statx flock fcntl getdents64", ActivityKind.FILE, "is in {}"),
)  # fmt: skip
_OF_CALL = {call: (kind, words) for calls, kind, words in _OF_CALLS for call in calls.split()}
_FILE_NAMES = {"openat": "open", "pread64": "read", "pwrite64": "write"}


def is_users(frame: Frame) -> bool:
    """Whether the line belongs to the user's program, not to a library."""
    return _NOT_THE_USERS.search(frame.file) is None


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's program, or else of a library, but Python's and torch's."""
    return next(chain(filter(is_users, frames), filter(_is_third_party, frames), frames), None)


def _is_third_party(frame: Frame) -> bool:
    file = frame.file
    return not _STANDARD.search(file) and "/torch/" not in file and "rallypoint/" not in file


def activity(worker: WorkerFacts) -> Activity:
    """The activity of a worker's main thread."""
    main = main_stack(worker.stacks)
    if main is None:
        return _without_stacks(worker)
    found = of_thread(main, worker.process)
    if found.kind is ActivityKind.UNKNOWN:
        others = [each for each in worker.stacks if each != main]
        found = _of_kernel(found, worker.process, others)
    if worker.library and found.kind is ActivityKind.RUNS:
        return replace(found, note=f"{found.note} in {worker.library}")
    return found


def current_site(worker: WorkerFacts) -> str:
    """The line that it is at, of the program or of a package: ``"train.py:31"``, or empty."""
    frame = activity(worker).frame
    if frame is None or not (is_users(frame) or _is_third_party(frame)):
        return ""
    return short_site(f"{frame.file}:{frame.line}")


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    """The main thread's stack; Python prints it last."""
    return next((each for each in stacks if each.is_main), stacks[-1] if stacks else None)


def _without_stacks(worker: WorkerFacts) -> Activity:
    """The kind stays unknown: a thread that waits for others may be in any system call."""
    if worker.process is None:
        reason = "it has ended" if worker.end else "its process could not be inspected"
        words = f"was elsewhere: cannot determine where, because {reason}"
        return Activity(ActivityKind.UNKNOWN, words, strength=Strength.UNKNOWN)
    reason = worker.no_stacks_because or "its Python stack could not be read"
    found = _of_kernel(Activity(ActivityKind.UNKNOWN, "waits"), worker.process, [])
    does = "is elsewhere" if found.words == "is" else found.words.removesuffix(" called")
    note = f" ({found.note})" if found.note else ""
    words = f"{does}{note}: cannot determine the line, because {reason}"
    return Activity(ActivityKind.UNKNOWN, words, strength=Strength.UNKNOWN)


def of_thread(stack: Stack, process: Process | None = None) -> Activity:
    """The activity of a thread, from its frames alone; an import's age is that of the process."""
    frame = users_frame(stack.frames)
    if stack.collects_garbage:
        return Activity(ActivityKind.GARBAGE, "collects garbage", frame)
    found: Activity | None = None
    inner = 0
    for each in stack.frames:
        if is_users(each):
            break
        inner += 1
        found = _in_table(each) or found
    if found is None or not found.kind.communicates:
        found = _import(stack.frames, inner, process) or found
    if found is None:
        return Activity(ActivityKind.UNKNOWN, "is", frame)
    return found if found.kind is ActivityKind.IMPORT else replace(found, frame=frame)


def _in_table(frame: Frame) -> Activity | None:
    for file, function, kind, words in _TABLE:
        if file.search(frame.file) and function.fullmatch(frame.function):
            name = "backward" if frame.function == "_engine_run_backward" else frame.function
            return Activity(
                kind,
                words.format(frame.function),
                waits_in=name if kind.communicates else "",
                strength=Strength.INFERRED if kind is ActivityKind.LOCK else Strength.CERTAIN,
            )
    return None


def _import(frames: Sequence[Frame], inner: int, process: Process | None) -> Activity | None:
    """The import in progress, of the module requested first; `inner` frames are of libraries."""
    imports = [index for index, frame in enumerate(frames) if _is_import(frame)]
    if not imports:
        return None
    if inner <= imports[0] and frames[inner].function != "<module>":
        return None
    within = [each for each in frames[: imports[-1]] if not _is_import(each)]
    module = _module(within[-1].file) if within else ""
    outside = next((each for each in reversed(frames) if is_users(each)), None)
    words = f"is still importing {module or 'a module'}"
    age = f"{process.age_s:.0f} s" if process else ""
    return Activity(ActivityKind.IMPORT, words, outside, note=age)


def _is_import(frame: Frame) -> bool:
    return frame.file.startswith("<frozen importlib")


def _module(file: str) -> str:
    """The library of a file, e.g. ``transformers``; for the user's own files, the file's name."""
    _, packages, inside = file.rpartition("-packages/")
    if packages:
        return inside.partition("/")[0].removesuffix(".py")
    name = short_site(file)
    if name == "__init__.py":
        name = file.rpartition("/")[0].rpartition("/")[2]
    return name.removesuffix(".py")


def _of_kernel(found: Activity, process: Process | None, others: Sequence[Stack]) -> Activity:
    """The activity of a thread whose innermost line calls C code, or runs Python."""
    thread = process.main_thread if process else None
    observed = thread or process
    if process is None or observed is None:
        return replace(found, words="is")
    if observed.cpu >= 0.5 or (observed.state == "R" and observed.cpu + process.starved > 0.1):
        percent = f"{min(observed.cpu, 1.0) * 100:.0f} % CPU"
        return replace(found, kind=ActivityKind.RUNS, words="runs", note=percent)
    call, path = (thread.syscall, thread.path) if thread else ("", "")
    if call == "read" and path.startswith(("/dev/pts/", "/dev/tty")):
        return replace(found, kind=ActivityKind.PROMPT, words="waits for input from a terminal")
    if call in _OF_CALL:
        kind, words = _OF_CALL[call]
        name = _FILE_NAMES.get(call, call)
        of_path = f" of {path}" if path else ""
        return replace(found, kind=kind, words=words.format(name) + of_path)
    if call == "futex" and any(users_frame(each.frames) for each in others):
        strength = Strength.INFERRED
        return replace(found, kind=ActivityKind.LOCK, words=WAITS_FOR_LOCK, strength=strength)
    return replace(
        found,
        kind=ActivityKind.C_CODE,
        words="waits in C code called",
        note=call or "asleep",
        strength=Strength.UNKNOWN,
    )
