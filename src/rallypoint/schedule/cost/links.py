"""Link models: how long a message takes between two ranks, and which resources are shared.

The model follows LogGP. A send occupies its lane for `overhead + bytes / bandwidth`; the message
arrives `latency` later; receiving it costs `overhead` and the time to read its bytes. Links within
a socket, a node or a rack have their own constants.

    rank 0   |overhead|bytes / bandwidth|
                                        \\ latency
    rank 1                               |overhead|operands x bytes / reduce rate|

Models are TOML files in link_models/, or the user's own. A file may hold variants (protocols of one
library) and, in each, families of algorithms with their own constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.base.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Level:
    """The links between ranks that share a group of this size, but no smaller one.

    Attributes:
        ranks: the size of the group; 0 for a node, whose size the caller gives; inf for all.
    """

    name: str
    ranks: float
    latency_us: float
    overhead_us: float = 0.0
    gb_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Links:
    """One set of constants.

    Attributes:
        levels: from the nearest to the farthest.
        start_us: the time before the first and after the last operation of a call.
        reduce_gb_per_s: how fast one rank reads and combines operands.
        slots: the number of messages that a lane can have in flight.
        block_bytes: the largest message; larger ones are sent in several pieces.
        nic_gb_per_s: the bandwidth of all ranks of a node together to other nodes.
        cores: the number on a node; if fewer than ranks, these take turns.
        shares_core: whether all lanes of a rank are run by one core.
        multicast: whether a send to several ranks is written once, for all to read.
        slowdown: (bytes of a call, factor by which each byte costs more), for calls too large for
            caches; interpolated in between.
        crowds: other constants for nodes with more ranks, as (ranks, constants), in ascending
            order.
    """

    name: str
    levels: tuple[Level, ...]
    start_us: float = 0.0
    reduce_gb_per_s: float = math.inf
    slots: int = 8
    block_bytes: int = 1 << 19
    nic_gb_per_s: float = math.inf
    cores: int = 0
    shares_core: bool = False
    multicast: bool = False
    slowdown: tuple[tuple[float, float], ...] = ()
    crowds: tuple[tuple[int, Links], ...] = ()

    def on(self, per_node: int) -> Links:
        """The constants for nodes of this many ranks."""
        for ranks, links in reversed(self.crowds):
            if per_node >= ranks:
                return links.on(per_node)
        levels = tuple(
            replace(level, ranks=per_node) if level.ranks == 0 else level for level in self.levels
        )
        return replace(self, levels=levels, crowds=())

    def slowdown_at(self, nbytes: float) -> float:
        """The factor by which each byte of a call costs more."""
        if not self.slowdown or nbytes <= 0:
            return 1.0
        sizes, factors = zip(*self.slowdown, strict=True)
        return float(np.interp(math.log2(nbytes), np.log2(sizes), factors))

    def between(self, one: int, other: int) -> Level:
        """The level of the link between two ranks."""
        for level in self.levels[:-1]:
            if one // level.ranks == other // level.ranks:
                return level
        return self.levels[-1]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A file of constants.

    Attributes:
        source: where the constants come from.
        note: a remark for results, e.g. what was measured on the real machine.
        per_node: ranks on a node, unless the caller says otherwise.
        measured_ranks: the largest number of ranks that was measured; 0 if not measured by us.
        variants: variant (``""`` if there is one only) -> family of algorithms -> constants.
        families: algorithm -> its family; those not listed belong to ``"other"``.
    """

    name: str
    source: str
    note: str
    per_node: int
    variants: dict[str, dict[str, Links]]
    families: dict[str, str] = field(default_factory=dict)
    measured_ranks: int = 0

    def links(self, variant: str, algorithm: str) -> Links:
        """The constants for an algorithm."""
        return self.variants[variant][self.families.get(algorithm, "other")]


def known_models() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().glob("*.toml"))


def read_model(name: str) -> LinkModel:
    """Read a model of the package by its name or an unambiguous part of it, or a TOML file."""
    return parse_model(read_model_text(name))


def read_model_text(name: str) -> str:
    """The text of a model; see read_model."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text()
        except OSError as error:
            raise InvalidArgumentError(f"cannot read the link model {name}: {error}") from error
    known = known_models()
    found = [name] if name in known else [each for each in known if name in each]
    if len(found) != 1:
        which = f"; {', '.join(found)} all match" if found else ""
        raise InvalidArgumentError(
            f"there is no link model {name!r}{which}; name one of {', '.join(known)}, "
            "or a .toml file"
        )
    return (_folder() / f"{found[0]}.toml").read_text()


def _folder() -> Path:
    return Path(__file__).with_name("link_models")


def parse_model(text: str) -> LinkModel:
    """Read a model from TOML; link_models/ethernet_100g.toml is a simple example."""
    import tomllib  # every rank would pay for it, and hardly any rank reads a model

    try:
        data = tomllib.loads(text)
        name = data["name"]
        families = data.get("families", {})
        variants = data.get("variant", {"": {}})
        return LinkModel(
            name=name,
            source=data.get("source", ""),
            note=data.get("note", ""),
            per_node=data.get("per_node", 1),
            variants={key: _families(data, value) for key, value in variants.items()},
            families={each: family for family, names in families.items() for each in names},
            measured_ranks=data.get("measured_ranks", 0),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"this is not a link model: {error!r}") from error


def _families(data: dict[str, Any], variant: dict[str, Any]) -> dict[str, Links]:
    families = variant.get("family", {"other": {}})
    return {family: _links({**data, **variant, **own}) for family, own in families.items()}


def _links(data: dict[str, Any]) -> Links:
    sizes = {"node": 0.0, "network": math.inf}
    levels = [
        Level(
            name,
            level.get("ranks", sizes.get(name, math.inf)),
            **{key: float(value) for key, value in level.items() if key != "ranks"},
        )
        for name, level in data["level"].items()
    ]
    given = {each.name: data[each.name] for each in fields(Links) if each.name in data}
    points = data.get("slowdown", ())
    given["slowdown"] = tuple((float(size), float(times)) for size, times in points)
    crowds = {int(ranks): {**data, **own} for ranks, own in data.get("crowd", {}).items()}
    given["crowds"] = tuple(
        (ranks, _links({**own, "crowd": {}})) for ranks, own in sorted(crowds.items())
    )
    return Links(**{**given, "levels": tuple(levels)})
