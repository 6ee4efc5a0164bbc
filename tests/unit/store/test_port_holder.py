"""Who holds a port: told apart by its command, not by the folders that the command lies in."""

from __future__ import annotations

import pytest

from rallypoint.store.port_holder import is_launcher


@pytest.mark.parametrize(
    ("holder", "is_ours"),
    [
        ("process 7 (/opt/env/bin/rallypoint run train.py)", True),
        ("process 7 (/usr/bin/python3 -m rallypoint run train.py)", True),
        ("process 7 (/home/me/rallypoint/.venv/bin/python -m rallypoint run --nnodes 2)", True),
        ("process 7 (/home/me/rallypoint/.venv/bin/python -m http.server 29400)", False),
        ("process 7 (python /home/me/rallypoint/train.py)", False),
        ("process 7 (nginx)", False),
    ],
)
def test_a_launcher_is_known_by_its_program(holder: str, is_ours: bool) -> None:
    assert is_launcher(holder) is is_ours
