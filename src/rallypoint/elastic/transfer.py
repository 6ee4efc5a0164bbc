"""Newcomers get the state from the memory of the ranks that have it.

    1. the first source sends the outline: all but the contents of arrays
    2. a newcomer compares it with what it has itself, and makes room
    3. if a source is on its own host, it copies the arrays out of that one's memory
    4. otherwise the arrays' bytes are cut into pieces, which the sources share if they are on
       several hosts; a large piece goes straight from array to array, small arrays travel together

If a source dies, all ranks rendezvous again, and the transfer starts over with the remaining ones.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any, TypeVar

import numpy

from rallypoint._native import addresses_of
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.elastic.agreement import Settlement
from rallypoint.elastic.values import (
    ARRAY,
    Bytes,
    Leaf,
    Outline,
    Spec,
    count_arrays,
    empty,
    fill,
    is_model,
    leaf_of,
    mesh_of,
    outline,
    read,
    spec_of,
    write,
)
from rallypoint.engine.communicator import PeerMemoryAccess
from rallypoint.process_group.calls.collectives import barrier, broadcast
from rallypoint.process_group.calls.exchanges import all_gather_into_tensor
from rallypoint.process_group.calls.point_to_point import irecv, isend, recv, send
from rallypoint.process_group.groups.default import get_rank
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import Work

_PIECE = 8 << 20  # bytes
_SMALL = 64 << 10
_UNDER_WAY = 8  # pieces of each source
_STRETCH = 32 << 20  # bytes that a thread copies at once; between two of them Ctrl-C is served
_MOST_THREADS = 8  # of a newcomer
_NOBODY = -1
_WORD_BYTES = 8  # of an address

Readers = dict[int, int]
Piece = list[Bytes]
Item = TypeVar("Item")


def find_readers(settlement: Settlement, group: ProcessGroup) -> Readers:
    """Which newcomers read, and from which source; all ranks call it and get the same.

    source                                       newcomer
        sends where its arrays are  ------------->   copies them, with all the cores that it may use
        waits, and so changes nothing
                                    <-------------   "I have them", or "I could not"
        all enter a barrier

    Nothing but memory limits this: no rank passes on what another one needs, and small arrays take
    little longer than large ones. A source that learns of a loss while it waits changes its arrays,
    but never enters the barrier, so a newcomer that gets beyond it has what the source had.
    """
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
    """Source: send a newcomer the locations of the arrays."""
    send(numpy.frombuffer(addresses_of(arrays), numpy.uint8), reader)


def has_read(reader: int) -> bool:
    """Source: wait until the newcomer has read them, or could not."""
    answer = numpy.empty(1, numpy.int64)
    recv(answer, reader)
    return bool(answer[0])


def copy_out(arrays: list[Bytes], source: int, readers: Readers, group: ProcessGroup) -> bool:
    """Newcomer: copy the source's arrays into these; whether it could."""
    addresses = numpy.empty(len(arrays) * _WORD_BYTES, numpy.uint8)
    recv(addresses, source)
    could = _copy(arrays, addresses.tobytes(), source, readers, group)
    send(numpy.array([could], numpy.int64), source)
    return could


def _copy(
    arrays: list[Bytes], addresses: bytes, source: int, readers: Readers, group: ProcessGroup
) -> bool:
    communicator = group.communicator
    group_rank = group.group_rank(source, "source")

    def take(bounds: tuple[int, int]) -> bool:
        begin, end = bounds
        words = addresses[begin * _WORD_BYTES : end * _WORD_BYTES]
        if communicator.gone():
            return False
        return communicator.native.read_memory(group_rank, words, arrays[begin:end])

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


def synchronize(values: dict[str, Any], settlement: Settlement, group: ProcessGroup) -> None:
    """All ranks of a group call it: those that have the state, and those that get it.

    Args:
        values: by name; a newcomer's arrays get their contents, other values are replaced.
        settlement: says which ranks these are, by global ranks.
    """
    me, first = get_rank(), settlement.sources[0]
    readers = find_readers(settlement, group)
    mine: list[Any] = []
    drawn = {name: outline(read(value), mine) for name, value in values.items()}
    is_newcomer = me in settlement.newcomers
    my_specs = [spec_of(each) for each in mine] if is_newcomer or me == first else []
    packed = _broadcast_bytes(_pack(drawn, my_specs) if me == first else b"", first, group)
    if is_newcomer:
        theirs, specs = _unpack(packed)
        _check(values, drawn, my_specs, theirs, specs)
        arrays = _room(drawn, mine, my_specs, theirs, specs)
        leaves = [leaf_of(each, is_room=True) for each in arrays]
        _exchange(leaves, settlement, readers, group)
        for leaf in leaves:
            leaf.store()
        every = iter(arrays)
        for name, each in theirs.items():
            values[name] = write(values[name], fill(each.tree, every))
    elif me in readers.values() or len(readers) < len(settlement.newcomers):
        _exchange([leaf_of(each) for each in mine], settlement, readers, group)
    barrier(group)  # no rank continues before all could copy it


def _broadcast_bytes(data: bytes, source: int, group: ProcessGroup) -> bytes:
    size = numpy.array([len(data)], numpy.int64)
    broadcast(size, source, group)
    array = numpy.empty(int(size[0]), numpy.uint8)
    if get_rank() == source:
        array[:] = numpy.frombuffer(data, numpy.uint8)
    broadcast(array, source, group)
    return array.tobytes()


def _pack(drawn: Mapping[str, Outline], specs: Sequence[Spec]) -> bytes:
    """Each kind of array once: a state often has thousands of few kinds, whose pickling is slow."""
    numbers = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    try:
        return pickle.dumps((drawn, list(numbers), [numbers[spec] for spec in specs]))
    except Exception as error:  # whatever a value's own code raises
        name = next(filter(lambda each: not _can_be_pickled(drawn[each]), drawn), "?")
        raise InvalidArgumentError(
            f"{name} in this rank's elastic.State cannot be pickled ({error}); give it state_dict "
            "and load_state_dict, or leave it out"
        ) from None


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _unpack(data: bytes) -> tuple[dict[str, Outline], list[Spec]]:
    drawn, kinds, numbers = pickle.loads(data)
    return drawn, [kinds[number] for number in numbers]


def _check(
    values: Mapping[str, object],
    mine: Mapping[str, Outline],
    my_specs: Sequence[Spec],
    theirs: Mapping[str, Outline],
    specs: Sequence[Spec],
) -> None:
    """Whether both have the same names, and arrays of the same kind under them.

    What optimizers and others have in theirs may come and go.
    """
    if values.keys() != theirs.keys():
        raise InvalidArgumentError(
            f"this rank's elastic.State has {', '.join(sorted(values))}, but the other ranks' has "
            f"{', '.join(sorted(theirs))}; start all ranks with the same program"
        )
    own, others = _by_name(mine, my_specs), _by_name(theirs, specs)
    for name, value in values.items():
        here = _fixed(name, mine[name].tree, own[name], is_deep=is_model(value))
        there = _fixed(name, theirs[name].tree, others[name], is_deep=is_model(value))
        for place in dict.fromkeys((*here, *there)):
            here_is, there_is = here.get(place, "no array"), there.get(place, "no array")
            if here_is != there_is and str(here_is) != str(there_is):
                raise InvalidArgumentError(
                    f"{place} in this rank's elastic.State is {here_is}, but on the other ranks it "
                    f"is {there_is}; start all ranks with the same program and data"
                )


def _by_name(drawn: Mapping[str, Outline], items: Iterable[Item]) -> dict[str, list[Item]]:
    """What belongs to the arrays of all outlines, in their order."""
    every = iter(items)
    return {name: list(islice(every, each.size)) for name, each in drawn.items()}


def _fixed(name: str, tree: Any, specs: Sequence[Spec], *, is_deep: bool) -> dict[str, Spec]:
    """What must be alike: a value that is an array, and the arrays of a model, by their names.

    A single number may be one of Python's or an array without dimensions, as a loss is.
    """
    if tree is ARRAY:
        return {name: specs[0]} if specs[0].shape else {}
    found: dict[str, Spec] = {}
    if is_deep:
        at = 0
        for key, each in tree.items():
            if each is ARRAY:
                found[f"{name}[{key!r}]"] = specs[at]
            at += count_arrays(each)
    return found


def _room(
    mine: Mapping[str, Outline],
    own: Sequence[object],
    my_specs: Sequence[Spec],
    theirs: Mapping[str, Outline],
    specs: Sequence[Spec],
) -> list[Any]:
    """Where to receive: this rank's arrays, where they are alike, otherwise new ones."""
    arrays: list[Any] = []
    mesh = mesh_of(own)
    own_by_name, my_specs_by_name = _by_name(mine, own), _by_name(mine, my_specs)
    for name, wanted in _by_name(theirs, specs).items():
        is_alike = wanted == my_specs_by_name[name]
        arrays += own_by_name[name] if is_alike else [empty(spec, mesh) for spec in wanted]
    return arrays


def pieces_of(leaves: Sequence[Leaf]) -> list[Piece]:
    """The bytes of all arrays, cut; the same on all ranks, as sizes are."""
    pieces: list[Piece] = []
    together: Piece = []
    size = 0
    for leaf in leaves:
        data = leaf.data
        nbytes = data.size
        if nbytes > _PIECE:
            pieces += [[data[at : at + _PIECE]] for at in range(0, nbytes, _PIECE)]
        elif nbytes > _SMALL:
            pieces.append([data])
        elif nbytes:
            together.append(data)
            size += nbytes
            if size >= _PIECE // 2:
                pieces.append(together)
                together, size = [], 0
    return [*pieces, together] if together else pieces


def _exchange(
    leaves: Sequence[Leaf], settlement: Settlement, readers: Readers, group: ProcessGroup
) -> None:
    """Get the contents, or give them, or neither."""
    me = get_rank()
    pieces = pieces_of(leaves)
    arrays = [data for piece in pieces for data in piece]
    mine = [reader for reader, source in readers.items() if source == me]
    for reader in mine:
        show(arrays, reader)
    if me in readers and not copy_out(arrays, readers[me], readers, group):
        _hand_over(pieces, readers[me], me)
    if others := tuple(each for each in settlement.newcomers if each not in readers):
        _exchange_messages(pieces, settlement.sources, others, group)
    for reader in mine:
        if not has_read(reader):
            _hand_over(pieces, me, reader)


def _exchange_messages(
    pieces: Sequence[Piece], sources: Sequence[int], newcomers: Sequence[int], group: ProcessGroup
) -> None:
    me = get_rank()
    are_here = len(group.communicator.here) == group.size()
    if are_here:
        sources = sources[:1]  # more would compete for the same memory and cores
    if len(sources) == 1 and len(newcomers) == group.size() - 1:
        _broadcast(pieces, sources[0], group)
    elif are_here and len(newcomers) == 1:
        _hand_over(pieces, sources[0], newcomers[0])
    elif me in newcomers:
        _receive(pieces, sources)
    elif me in sources:
        _send(pieces[sources.index(me) :: len(sources)], newcomers)


def _hand_over(pieces: Sequence[Piece], source: int, newcomer: int) -> None:
    me = get_rank()
    if me == source:
        _move(pieces, lambda data: send(data, newcomer), is_source=True)
    elif me == newcomer:
        _move(pieces, lambda data: recv(data, source), is_source=False)


def _broadcast(pieces: Sequence[Piece], source: int, group: ProcessGroup) -> None:
    is_source = get_rank() == source
    _move(pieces, lambda data: broadcast(data, source, group), is_source=is_source)


def _move(
    pieces: Sequence[Piece], communicate: Callable[[Bytes], object], *, is_source: bool
) -> None:
    for piece in pieces:
        data = _joined(piece) if is_source else _buffer(piece)
        communicate(data)
        if not is_source:
            _spread(piece, data)


def _send(pieces: Sequence[Piece], newcomers: Sequence[int]) -> None:
    under_way: list[tuple[Work, Bytes]] = []  # with what must stay until it is sent
    for piece in pieces:
        data = _joined(piece)
        for newcomer in newcomers:
            under_way.append((_begun(isend(data, newcomer)), data))
        while len(under_way) > _UNDER_WAY * len(newcomers):
            under_way.pop(0)[0].wait()
    for work, _ in under_way:
        work.wait()


def _receive(pieces: Sequence[Piece], sources: Sequence[int]) -> None:
    under_way: list[tuple[Work, Piece, Bytes]] = []
    for number, piece in enumerate(pieces):
        data = _buffer(piece)
        work = _begun(irecv(data, sources[number % len(sources)]))
        under_way.append((work, piece, data))
        if len(under_way) >= _UNDER_WAY * len(sources):
            _finish(*under_way.pop(0))
    for each in under_way:
        _finish(*each)


def _begun(work: Work | None) -> Work:
    assert work is not None  # this rank is in the default group
    return work


def _finish(work: Work, piece: Piece, data: Bytes) -> None:
    work.wait()
    _spread(piece, data)


def _buffer(piece: Piece) -> Bytes:
    """Where to receive it: the array itself, or a buffer for several small ones."""
    return piece[0] if len(piece) == 1 else numpy.empty(sum(map(len, piece)), numpy.uint8)


def _joined(piece: Piece) -> Bytes:
    return piece[0] if len(piece) == 1 else numpy.concatenate(piece)


def _spread(piece: Piece, data: Bytes) -> None:
    """Give small arrays, which came together, their contents."""
    if len(piece) == 1:
        return
    begin = 0
    for each in piece:
        each[:] = data[begin : begin + each.size]
        begin += each.size
