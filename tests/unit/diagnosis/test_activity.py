"""What stacks and system calls say; stacks as PyTorch 2.13 and Python 3.11 leave them."""

from __future__ import annotations

import re

import pytest

from rallypoint.diagnosis.activity import _FRAMES, ActivityKind, activity, current_site
from rallypoint.diagnosis.facts import WorkerFacts
from tests.pages import ROOT
from tests.unit.diagnosis.jobs import TORCH, process, stack, worker

_PYTHON = "/usr/lib/python3.11"
_C10D = f"{TORCH}/distributed/distributed_c10d.py"
_WRAPPER = f"{TORCH}/distributed/c10d_logger.py:83 wrapper"
_OURS = "/venv/lib/python3.11/site-packages/rallypoint/process_group"
_HERE = "/home/u/train.py:40 step"
_IMPORT = [
    "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
    "<frozen importlib._bootstrap_external>:940 exec_module",
    "<frozen importlib._bootstrap>:1176 _find_and_load",
]

_STACKS = [
    ([f"{_C10D}:3252 all_reduce", _WRAPPER], ActivityKind.COLLECTIVE, "waits in all_reduce"),
    ([f"{_C10D}:5356 barrier", _WRAPPER], ActivityKind.COLLECTIVE, "waits in barrier"),
    (
        [f"{_C10D}:4287 all_gather", _WRAPPER, f"{_C10D}:3513 all_gather_object", _WRAPPER],
        ActivityKind.COLLECTIVE,
        "waits in all_gather_object",
    ),
    ([f"{_C10D}:2799 recv", _WRAPPER], ActivityKind.TRANSFER, "waits in recv"),
    (
        [
            f"{TORCH}/distributed/rendezvous.py:199 _create_c10d_store",
            f"{_C10D}:1892 init_process_group",
            _WRAPPER,
        ],
        ActivityKind.INIT,
        "waits in init_process_group",
    ),
    (
        [
            f"{_C10D}:2169 _new_process_group_helper",
            f"{_C10D}:6056 _new_group_with_tag",
            f"{_C10D}:5863 new_group",
        ],
        ActivityKind.INIT,
        "waits in new_group",
    ),
    ([f"{_C10D}:2333 destroy_process_group"], ActivityKind.C_CODE, "is in destroy_process_group"),
    (
        [f"{TORCH}/autograd/graph.py:979 _engine_run_backward", f"{TORCH}/_tensor.py:623 backward"],
        ActivityKind.CALLS,
        "is in backward",
    ),
    (
        [
            f"{TORCH}/_ops.py:882 redispatch",
            f"{TORCH}/distributed/_functional_collectives.py:142 wait_tensor",
            f"{TORCH}/distributed/_functional_collectives.py:1111 __repr__",
        ],
        ActivityKind.CALLS,
        "waits for a collective",
    ),
    (
        [
            f"{_PYTHON}/selectors.py:415 select",
            f"{_PYTHON}/multiprocessing/connection.py:947 wait",
            f"{_PYTHON}/multiprocessing/queues.py:113 get",
            f"{TORCH}/utils/data/dataloader.py:1291 _try_get_data",
            f"{TORCH}/utils/data/dataloader.py:725 __next__",
        ],
        ActivityKind.LOADER,
        "waits for its data loader",
    ),
    (
        [
            f"{TORCH}/serialization.py:864 _open_zipfile_writer",
            f"{TORCH}/serialization.py:1002 save",
        ],
        ActivityKind.CHECKPOINT,
        "is in torch.save",
    ),
    (
        [f"{_PYTHON}/threading.py:327 wait", f"{_PYTHON}/threading.py:629 wait"],
        ActivityKind.LOCK,
        "waits for a lock in its own process",
    ),
    (
        [f"{_PYTHON}/threading.py:1139 _wait_for_tstate_lock", f"{_PYTHON}/threading.py:1119 join"],
        ActivityKind.LOCK,
        "waits for one of its threads",
    ),
    (
        [f"{_PYTHON}/threading.py:327 wait", f"{_PYTHON}/queue.py:171 get"],
        ActivityKind.QUEUE,
        "waits for a queue in its own process",
    ),
    (
        [f"{_PYTHON}/subprocess.py:2004 _try_wait", f"{_PYTHON}/subprocess.py:550 run"],
        ActivityKind.SUBPROCESS,
        "waits for a process that it started",
    ),
    (
        [f"{_PYTHON}/socket.py:706 readinto", f"{_PYTHON}/http/client.py:286 _read_status"],
        ActivityKind.SOCKET,
        "waits for a connection",
    ),
    (
        [
            f"{_OURS}/formation/opening.py:170 find_world",
            f"{_OURS}/formation/opening.py:443 init_process_group",
        ],
        ActivityKind.INIT,
        "waits in init_process_group",
    ),
    (
        [f"{_OURS}/calls/collectives.py:81 all_reduce"],
        ActivityKind.COLLECTIVE,
        "waits in all_reduce",
    ),
    (
        [f"{_OURS}/calls/point_to_point.py:9 send"],
        ActivityKind.TRANSFER,
        "waits in send",
    ),
]


def seen(*places: str, **kernel: object) -> WorkerFacts:
    return worker(0, stacks=[stack(*places)], at=process(0, **kernel))  # type: ignore[arg-type]


@pytest.mark.parametrize(("places", "kind", "words"), _STACKS)
def test_stacks(places: list[str], kind: ActivityKind, words: str) -> None:
    found = activity(seen(*places, _HERE, "/home/u/train.py:60 main", syscall="futex"))
    assert (found.kind, found.words, found.site) == (kind, words, "train.py:40")


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ({"syscall": "clock_nanosleep"}, "is in time.sleep at train.py:40"),
        ({"syscall": "openat", "path": "/fifo"}, "is in open of /fifo at train.py:40"),
        ({"syscall": "read", "path": "/data/x"}, "is in read of /data/x at train.py:40"),
        ({"syscall": "wait4"}, "waits for a process that it started at train.py:40"),
        ({"syscall": "poll"}, "waits for a connection at train.py:40"),
        ({"state": "R", "cpu": 1.0}, "runs at train.py:40 (100 % CPU)"),
        ({"syscall": "futex"}, "waits in C code called at train.py:40 (futex)"),
    ],
)
def test_lines_that_call_c_code(kernel: dict[str, object], told: str) -> None:
    assert str(activity(seen(_HERE, **kernel))) == told


def test_a_lock_can_only_be_held_by_another_thread() -> None:
    other = stack("/home/u/cache.py:70", thread="0x2", is_main=False)
    both = worker(0, stacks=[other, stack(_HERE)], at=process(0, syscall="futex"))
    assert activity(both).kind is ActivityKind.LOCK


def test_imports() -> None:
    library = "/venv/lib/python3.11/site-packages"
    places = [
        f"{library}/torch/_numpy/_funcs.py:6 <module>",
        *_IMPORT,
        f"{library}/torch/__init__.py:2868 <module>",
        *_IMPORT,
    ]
    inside = activity(seen(*places, _HERE, age_s=9.0))
    assert str(inside) == "is still importing torch at train.py:40 (9 s)"
    cut_off = activity(seen(*places[:-3], age_s=9.0))  # 100 frames are all that Python prints
    assert cut_off.kind is ActivityKind.IMPORT
    own = activity(seen("/home/u/model/__init__.py:2 <module>", *_IMPORT, _HERE))
    assert own.words == "is still importing model"


def test_a_call_within_an_import_is_a_call() -> None:
    places = [f"{_C10D}:3252 all_reduce", "/home/u/job.py:4 <module>", *_IMPORT, "/home/u/run.py:1"]
    found = activity(seen(*places))
    assert (found.kind, found.site) == (ActivityKind.COLLECTIVE, "job.py:4")


def test_the_program_of_an_imported_module_is_no_import() -> None:
    found = activity(seen("/home/u/job.py:4 main", "/home/u/job.py:9 <module>", *_IMPORT, _HERE))
    assert found.kind is not ActivityKind.IMPORT


def test_of_libraries_the_innermost_that_is_neither_pythons_nor_torchs() -> None:
    trainer = "/venv/lib/python3.11/site-packages/transformers/trainer.py"
    places = [f"{_C10D}:5356 barrier", f"{trainer}:2200 train", "/venv/bin/launch:8"]
    assert activity(seen(*places[:2])).site == "trainer.py:2200"


@pytest.mark.parametrize(
    ("places", "site"),
    [
        ([f"{_PYTHON}/threading.py:320 wait", _HERE], "train.py:40"),
        (["/venv/lib/python3.11/site-packages/trainer/loop.py:7 fit"], "loop.py:7"),
        ([f"{_PYTHON}/threading.py:320 wait"], ""),
        ([f"{_C10D}:3252 all_reduce", _WRAPPER], ""),
    ],
)
def test_the_line_of_a_program_or_of_a_package(places: list[str], site: str) -> None:
    assert current_site(seen(*places)) == site


def test_garbage() -> None:
    found = activity(worker(0, stacks=[stack(_HERE, collects_garbage=True)]))
    assert str(found) == "collects garbage at train.py:40"


def test_without_a_stack_the_kernel_tells_what_but_not_where() -> None:
    blind = worker(0, at=process(0, syscall="clock_nanosleep"), no_stacks_because="it is too old")
    told = "is in time.sleep: cannot determine the line, because it is too old"
    assert str(activity(blind)) == told


def test_files_of_ours_that_frames_are_recognized_by_exist() -> None:
    files = [path.as_posix() for path in (ROOT / "src/rallypoint").rglob("*.py")]
    for file, *_ in _FRAMES:
        if file.startswith("rallypoint/"):
            assert any(re.search(f"{file}$", each) for each in files), file
