"""Where a step of a model is in the C++ code, and which memory order the code gives it.

The order is read from the source: whoever weakens one there has it weakened in the model, and who
moves or renames a step is told that the model no longer shows what the code does.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "native" / "engine"


class Order(enum.Enum):
    NONE = "none"  # of a fence: it is not there
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"
    SEQ_CST = "seq_cst"

    @property
    def acquires(self) -> bool:
        return self in (Order.ACQUIRE, Order.ACQ_REL, Order.SEQ_CST)

    @property
    def releases(self) -> bool:
        return self in (Order.RELEASE, Order.ACQ_REL, Order.SEQ_CST)


@dataclass(frozen=True, slots=True)
class Site:
    """A statement: the one in `function` of native/engine/`file` that contains `text`.

    `after`, if given, is a text that comes before it in that function. A statement without a memory
    order has the language's default, and the engine's `fence()` is a full one.
    """

    file: str
    function: str
    text: str
    after: str = ""

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}"

    @property
    def is_fence(self) -> bool:
        return "fence(" in self.text

    def order(self) -> Order:
        """What the code says. Raises LookupError if it no longer has such a statement."""
        text = body(self.file, self.function)
        start = text.find(self.after)
        found = text.find(self.text, start) if start >= 0 else -1
        if found < 0:
            raise LookupError(
                f"{self} is no longer there{f' after {self.after}' if self.after else ''}: "
                "have tests/model say what the code does now"
            )
        statement = re.split(r";|\) \{|\? |&&", text[found:], maxsplit=1)[0]
        said = re.search(r"memory_order_(\w+)", statement)
        return Order(said[1]) if said else Order.SEQ_CST


@cache
def body(file: str, function: str) -> str:
    """The text of a function, from its name to the brace that ends it."""
    text = (ENGINE / file).read_text()
    pattern = rf"^( *)[^\n/]*\b{re.escape(function)}\([^;{{]*\{{(?:[^\n]*\}}\n|.*?^\1\}})"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{file} has no {function}: have tests/model say what the code does now")
    return found[0]
