"""A newcomer copies the state out of the memory of a rank on its own host.

    source                                       newcomer
    tells where its arrays are  ------------->   copies them, with all the cores that it may use
    waits, and so changes nothing
                                <-------------   "I have them", or "I could not"
    all meet in a barrier

Nothing but memory limits this: no rank passes on what another one needs, and small arrays take
little longer than large ones. A source that learns of a loss while it waits changes its arrays, but
never comes to the barrier, so a newcomer that gets beyond it has what the source had.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy

from rallypoint._native import addresses_of
from rallypoint.elastic.agreement import Settlement
from rallypoint.elastic.values import Bytes
from rallypoint.engine.communicator import PeerMemoryAccess
from rallypoint.process_group.calls.exchanges import all_gather_into_tensor
from rallypoint.process_group.calls.point_to_point import recv, send
from rallypoint.process_group.groups.default import get_rank
from rallypoint.process_group.groups.group import ProcessGroup

_STRETCH = 32 << 20  # bytes that a thread copies at once; between two of them Ctrl-C is served
_MOST_THREADS = 8  # of a newcomer
_NOBODY = -1
_WORD_BYTES = 8  # of an address

Readers = dict[int, int]


def find_readers(settlement: Settlement, group: ProcessGroup) -> Readers:
    """Which newcomers read, and from which source; all ranks call it and get the same."""
    choice = numpy.array([_my_source(settlement, group)], numpy.int64)
    choices = numpy.empty(group.size(), numpy.int64)
    all_gather_into_tensor(choices, choice, group)
    chosen = dict(zip(group.ranks, choices.tolist(), strict=True))
    return {rank: source for rank, source in chosen.items() if source != _NOBODY}


def _my_source(settlement: Settlement, group: ProcessGroup) -> int:
    me, communicator = get_rank(), group.communicator
    if me not in settlement.newcomers or PeerMemoryAccess.PRIVATE not in communicator.reach:
        return _NOBODY
    here = {group.ranks[place] for place in communicator.here}
    near = [source for source in settlement.sources if source in here]
    return near[settlement.newcomers.index(me) % len(near)] if near else _NOBODY


def show(arrays: list[Bytes], reader: int) -> None:
    """Source: tell a newcomer where the arrays are."""
    send(numpy.frombuffer(addresses_of(arrays), numpy.uint8), reader)


def has_read(reader: int) -> bool:
    """Source: wait until the newcomer has read them, or could not."""
    answer = numpy.empty(1, numpy.int64)
    recv(answer, reader)
    return bool(answer[0])


def copy_out(arrays: list[Bytes], source: int, readers: Readers, group: ProcessGroup) -> bool:
    """Newcomer: copy the source's arrays into these; whether it could.

    Raises:
        PeerLostError: a rank died meanwhile.
    """
    addresses = numpy.empty(len(arrays) * _WORD_BYTES, numpy.uint8)
    recv(addresses, source)
    could = _copy(arrays, addresses.tobytes(), source, readers, group)
    send(numpy.array([could], numpy.int64), source)
    return could


def _copy(
    arrays: list[Bytes], addresses: bytes, source: int, readers: Readers, group: ProcessGroup
) -> bool:
    communicator = group.communicator
    place = group.group_rank(source, "source")

    def take(bounds: tuple[int, int]) -> bool:
        begin, end = bounds
        words = addresses[begin * _WORD_BYTES : end * _WORD_BYTES]
        if communicator.gone():
            return False
        return communicator.native.read_memory(place, words, arrays[begin:end])

    sharers = sum(group.group_rank(reader, "reader") in communicator.here for reader in readers)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // sharers)
    stretches = list(_stretches(arrays))
    if threads < 2 or len(stretches) < 2:
        return all(map(take, stretches))
    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(take, stretches))


def _stretches(arrays: Sequence[Bytes]) -> Iterator[tuple[int, int]]:
    """Where to cut the list, so that each part has about as many bytes."""
    cuts, size = [0], 0
    for end, array in enumerate(arrays, 1):
        size += array.size
        if size >= _STRETCH or end == len(arrays):
            cuts.append(end)
            size = 0
    return pairwise(cuts)
