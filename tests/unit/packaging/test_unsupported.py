"""Where Rallypoint does not run, or cannot be built, its build ends with a sentence at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sys.executable).parent


def configure(folder: Path, *options: str, **variables: str) -> str:
    """What CMake says, its lines joined."""
    cmake = shutil.which("cmake", path=SCRIPTS) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake: .venv/bin/pip install --group build")
    command = [cmake, "-S", str(ROOT), "-B", str(folder), *options]
    environ = os.environ | variables
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_another_system(system: str, tmp_path: Path) -> None:
    said = configure(tmp_path, f"-DCMAKE_SYSTEM_NAME={system}")
    assert f"Rallypoint runs on Linux, x86-64 and aarch64; this is {system}." in said
    assert CONTAINER in said


CONTAINER = (
    "docker build -t rallypoint -f examples/docker/Dockerfile . && docker run -it --rm rallypoint"
)


@pytest.fixture
def free_threaded(tmp_path: Path) -> str:
    """A folder for PYTHONPATH that makes Python say it was built without the GIL."""
    pretence = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
    (tmp_path / "sitecustomize.py").write_text(pretence)
    return str(tmp_path)


def test_a_build_for_free_threaded_python(free_threaded: str, tmp_path: Path) -> None:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    said = configure(tmp_path / "build", "-DSKBUILD=ON", python, PYTHONPATH=free_threaded)
    assert f"does not support free-threaded Python; this is {sys.executable}." in said
    assert CONTAINER in said


def test_an_environment_of_free_threaded_python(free_threaded: str, tmp_path: Path) -> None:
    command: list[str | Path] = [
        ROOT / "scripts" / "create_venv",
        sys.executable,
        tmp_path / "venv",
    ]
    environ = os.environ | {"PYTHONPATH": free_threaded}
    made = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert made.returncode == 1
    (line,) = made.stderr.splitlines()
    assert f"'{sys.executable}' is a free-threaded Python" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("platform = 'darwin'", "runs on Linux, x86-64 and aarch64; this is darwin."),
        ("platform = 'win32'", "runs on Linux, x86-64 and aarch64; this is win32."),
        ("abiflags = 't'", "does not support free-threaded Python; this is /"),
    ],
)
def test_an_import_elsewhere(change: str, said: str) -> None:
    code = f"import sys; sys.{change}; import rallypoint"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Rallypoint ")
    assert said in last
    assert last.endswith(CONTAINER)


def test_a_compiler_for_32_bits(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    probe = ["-m32", "-x", "c++", "-c", "/dev/null", "-o", str(tmp_path / "probe")]
    if compiler is None or subprocess.run([compiler, *probe], check=False).returncode != 0:
        pytest.skip("this machine's compiler knows 64 bits only")
    wanted = ["-DCMAKE_CXX_FLAGS=-m32", "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY"]
    said = configure(tmp_path / "build", *wanted)
    assert "Rallypoint runs on Linux, x86-64 and aarch64; this compiler makes programs for" in said
    assert "32 bits, LITTLE_ENDIAN." in said


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ (Debian: apt-get install g++)")
    old = tmp_path / "old-g++"
    old.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=9 "$@"\n')
    old.chmod(0o755)
    said = configure(tmp_path / "build", f"-DCMAKE_CXX_COMPILER={old}")
    assert "Rallypoint needs g++ 11, clang 14, or newer" in said
    assert "is GNU 9." in said


def test_no_compiler(tmp_path: Path) -> None:
    said = configure(tmp_path, CXX="absent-g++ -m64")
    assert "Rallypoint needs a C++ compiler, g++ 11, clang 14, or newer; no absent-g++" in said


def test_no_headers(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler (Debian: apt-get install g++)")
    python = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={tmp_path}/absent"]
    said = configure(tmp_path, "-DSKBUILD=ON", *python)
    assert "The C headers of Python 3." in said
    assert "are missing (Debian: apt install python3-dev)." in said


def test_all_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    """By `make`, before it makes an environment."""
    bare = tmp_path / "python3.11"  # of a Debian that has only the interpreter
    bare.write_text("#!/bin/sh\ncase $2 in *version_info*) exit 0 ;; esac\nexit 1\n")
    bare.chmod(0o755)
    for tool in ("sh", "uname", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    command: list[str | Path] = [ROOT / "scripts" / "create_venv", bare, tmp_path / "venv"]
    environ = {"PATH": str(tmp_path), "CXX": "absent-g++"}
    made = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert made.returncode == 1
    (line,) = made.stderr.splitlines()
    for missing in (f"the venv module of '{bare}'", "the C headers", "a C++ compiler 'absent-g++'"):
        assert missing in line
    assert line.endswith("(Debian: apt install python3.11-venv python3.11-dev g++).")


def test_the_environment_is_renewed_for_another_python(tmp_path: Path) -> None:
    """`make PYTHON=...` asks the script whether .venv is of that Python."""

    def differs(python: str, environment: Path) -> str:
        command = [str(ROOT / "scripts" / "create_venv"), "--differs", python, str(environment)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    other = tmp_path / "python3.99"
    other.write_text("#!/bin/sh\necho 3.99 /usr\n")
    other.chmod(0o755)
    assert differs(sys.executable, tmp_path) == ""
    assert differs(str(other), tmp_path) == "yes\n"
    assert differs(str(other), tmp_path / "absent") == ""  # it is made, not renewed
