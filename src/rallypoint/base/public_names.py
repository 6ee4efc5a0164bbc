"""The public names of a package, which its stub, __init__.pyi, lists, each once:

    from MODULE import NAME as NAME

They are loaded on first use, so that the launcher, which imports these packages too, pays for none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable


def names_on_first_use(
    package: dict[str, object],
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the package whose globals these are."""
    homes: dict[str, str] = {}  # public name -> its module

    def public() -> list[str]:
        if not homes:
            module = ""
            stub = f"{package['__file__']}i"
            with open(stub, encoding="utf-8") as lines:  # noqa: PTH123 - pathlib costs 8 ms
                for line in lines:
                    words = line.replace(",", "").split()
                    if words[:1] == ["from"]:
                        module = words[1]
                    if "as" in words[:-1] and module:
                        homes[words[words.index("as") + 1]] = module
        return sorted(homes)

    def load(name: str) -> object:
        if name == "__all__":
            return public()
        if name not in public():
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        package[name] = value
        return value

    return load, public
