"""The state of a training that outlives its ranks: what newcomers get, and when it may change."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Never

import numpy

from rallypoint.base.errors import InvalidArgumentError, MembershipChangedError, RallypointError
from rallypoint.elastic.agreement import RankReport, Settlement
from rallypoint.elastic.membership import LOSSES, View, membership
from rallypoint.elastic.transfer import synchronize
from rallypoint.elastic.values import UpdateParticipant, copied, read, restore
from rallypoint.engine.communicator import ReduceOp
from rallypoint.engine.step_record import ELASTIC, record_step
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.process_group.groups.default import resolve
from rallypoint.process_group.groups.group import ProcessGroup

_OURS = "use rallypoint.pytorch.elastic"
_FIXED = {  # by the name of the class
    "DistributedDataParallel": f"{_OURS}.DistributedDataParallel",
    "FullyShardedDataParallel": f"{_OURS}.HybridShard, with fully_shard",
    "FSDPModule": f"{_OURS}.HybridShard",
    "ZeroRedundancyOptimizer": "use the optimizer in it by itself",
    "DistributedSampler": "use elastic.Sampler",
    "PowerSGDState": "elastic DistributedDataParallel takes no hooks",
}


def refuse_fixed_size(name: str, value: object) -> None:
    """Refuse a value that fixes the number of ranks at creation.

    It would continue with wrong ranks after a loss, without an error. PyTorch is not imported here.
    """
    if isinstance(value, UpdateParticipant):
        return
    for kind in type(value).__mro__:
        instead = _FIXED.get(kind.__qualname__)
        if instead is not None and kind.__module__.startswith("torch."):
            raise InvalidArgumentError(
                f"{name} is a {kind.__name__}, which fixes the number of ranks at creation, so"
                f" elastic.State cannot hold it; {instead}"
            )


_BAND = ReduceOp.BAND  # looking up an enum's member takes as long as half an all_reduce

# The bits of an agreement.
_NOBODY_WAITS = 1
_IS_OVER = 2  # the training


class State:
    """Values that all ranks have in common, as attributes.

        state = elastic.State(step=0, parameters=parameters, optimizer=optimizer)
        state.step += 1

    A value is an array or a tensor; an object with `state_dict` and `load_state_dict`, such as a
    model, an optimizer or a scheduler; a random generator of NumPy or PyTorch; or anything that
    can be pickled. Arrays, models and optimizers keep their memory. Each rank must have the same
    names, and arrays of the same dtype and shape.

    Values that differ between ranks, such as a generator for each rank, do not belong here: derive
    them from the step, as `Sampler` does.

    Raises:
        InvalidArgumentError: a name begins with an underscore, or is that of a method; or a value
            is of a class of PyTorch's that fixes the number of ranks at creation.
    """

    _committed: int
    _prepared: int
    _settlement: Settlement | None
    _is_member: bool

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name):
                raise InvalidArgumentError(f"a value of elastic.State cannot be called {name!r}")
            refuse_fixed_size(name, value)
        own = self.__dict__  # the values are in it as well, as reading them must cost nothing
        own.update(
            values,
            _names=tuple(values),
            _participants=[each for each in values.values() if isinstance(each, UpdateParticipant)],
            _committed=0,
            _prepared=0,
            _prepared_in=-1,
            _is_member=False,
            _saved=None,
            _callbacks=[],
            _settlement=None,
        )
        own["_update"] = _Update(self)
        membership().enroll()
        own["_prepared"] = int(membership().is_newcomer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this elastic.State has no value {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(
                f"this elastic.State has no value {name!r}; name all values when it is made"
            )
        self.__dict__[name] = value

    def update(self) -> _Update:
        """Change the state on all ranks, or on none: ``with state.update(): ...``.

        Entering it is an agreement of all ranks (a reduction of 8 bytes). If a rank is lost before
        it, no rank enters, and `run` retries the step. If a rank is lost after it, the others
        complete their updates, and newcomers get the updated state. The block must change nothing
        but this rank's memory: it must neither communicate nor raise. Within it, the ranks are
        still those before the loss. After an exception in the block, this rank's state is half
        updated. It cannot make further updates; if it rejoins the others, it copies the state from
        them, as a newcomer.

        Raises:
            InvalidArgumentError: the last one ended with an exception, or this is within another.
            MembershipChangedError: ranks were lost or wait to join; `run` handles it. If this comes
                at the end of the block, the update has been made, but what follows it is not
                reached: do what belongs to certain steps, such as saving each thousandth state,
                before the next update.
        """
        return self._update  # type: ignore[no-any-return]

    def commit(self) -> None:
        """Keep a copy of the state, on all ranks or on none, to which `run` returns after a loss.

        For code that communicates while it changes the state; it takes memory for one copy. Call it
        once before the first change as well: before that there is nothing to return to.

        Raises:
            MembershipChangedError: ranks were lost or wait to join, as for `update`.
        """
        with self.update():
            self._saved = self._copies()

    def restore(self) -> None:
        """Return to the last `commit`; does nothing if there was none."""
        own = self.__dict__
        for name, tree in (self._saved or {}).items():
            own[name] = restore(own[name], tree)
        for each in self._participants:
            each.rollback()

    def sync(self) -> None:
        """Bring ranks that have joined up to date; `run` does it before it calls the function.

        All ranks call it.

        Raises:
            InvalidArgumentError: this rank has joined, and its values are of other names, dtypes or
                shapes than the others'.
            StateLostError: all ranks that had the state were lost.
            PeerLostError: a rank was lost meanwhile.
        """
        own = self.__dict__
        part = membership()
        settlement = self._settlement or part.settled
        if settlement is None:
            settlement = self._settlement = part.exchange(self._report)
        if settlement.newcomers:
            if not self._is_member:
                self._prepared = self._committed + 1  # what arrives is no state until all is here
            values = {name: own[name] for name in self._names}
            synchronize(values, settlement, part.peers)
            self._update.may_begin()
            own.update(values)
            if settlement.saves and not self._is_member:
                self._saved = self._copies()
        self._committed = self._prepared = settlement.committed
        self._is_member, self._settlement, part.settled = not part.is_idle, None, None
        if not part.is_idle:
            for each in self._participants:
                each.commit()

    def on_reset(self, callback: Callable[[], None]) -> None:
        """Call this each time after ranks have been lost or have joined, on all ranks.

        It may make subgroups again, or adapt the learning rate to the number of ranks.
        """
        self._callbacks.append(callback)

    # For `run`.

    def _end(self) -> None:
        """All have done their last step, and leave together."""
        self._update.say(_NOBODY_WAITS | _IS_OVER)
        try:
            with self._update:
                pass
        finally:
            self._update.say(_NOBODY_WAITS)

    def _follow(self) -> None:
        """Agree to the others' updates, and make none, until they leave."""
        try:
            is_over = False
            while not is_over:
                self._prepared = self._committed + 1
                is_over = self._update.follow()
                self._committed = self._prepared
        finally:
            self._update.say(_NOBODY_WAITS)

    @property
    def _report(self) -> RankReport:
        saves = self._saved is not None
        return RankReport(
            self._is_member, self._committed, self._prepared, saves, self._prepared_in
        )

    def _copies(self) -> dict[str, Any]:
        own = self.__dict__
        return {name: copied(read(own[name])) for name in self._names}

    def _go_on(self, loss: RallypointError | None) -> bool:
        """Meet the others in the newest round; returns whether to do the prepared update."""
        was_training = self._is_member and self._settlement is None
        settlement = self._settlement = membership().go_on(self._report, loss)
        is_due = self._is_member and settlement.committed > self._committed
        self._committed = self._prepared = settlement.committed
        membership().begins_again |= was_training and loss is not None and not is_due
        return bool(is_due)

    def _reset(self) -> None:
        for callback in self._callbacks:
            callback()


_ONLY_MEMORY = (
    "a call within state.update(): the block may only change this rank's memory; communicate "
    "before it, or use state.commit()"
)
_WITHIN = "an update cannot be within another one of the same state"
_HALF_DONE = (
    "the last state.update() ended with {}, so this rank's state is only half updated; do what can "
    "fail before the block"
)


class _Update:
    """The block of `State.update`."""

    __slots__ = (
        *("_has_changed", "_has_news", "_held", "_own", "_mine", "_part", "_participants"),
        *("_present", "_state", "_value", "_why_not", "_word"),
    )

    def __init__(self, state: State) -> None:
        self._state = state
        self._own = state.__dict__
        self._participants: list[UpdateParticipant] = self._own["_participants"]
        self._part = part = membership()
        self._has_news = part.has_news
        self._mine = _NOBODY_WAITS  # what this rank says, unless it has news
        self._word = numpy.full(1, self._mine, numpy.int64)
        self._value = self._word.data  # read faster than by NumPy
        self._held: tuple[ProcessGroup, ...] = ()  # whose calls are refused
        self._has_changed = False
        self._why_not = ""  # it cannot begin now
        self._present: View | None = None

    def say(self, bits: int) -> None:
        """What this rank reports to the others in agreements from now on."""
        self._mine = self._value[0] = bits

    def may_begin(self) -> None:
        """This rank has got the whole state."""
        self._why_not = ""

    def follow(self) -> bool:
        """Take part in the agreement on an update that is others'; whether it was the last one."""
        agreed = self._value
        agreed[0] = _IS_OVER if self._has_news() else _NOBODY_WAITS | _IS_OVER
        all_reduce(self._word, _BAND)
        if not agreed[0] & _NOBODY_WAITS:
            raise MembershipChangedError("ranks wait to join")
        return bool(agreed[0] & _IS_OVER)

    def __enter__(self) -> None:
        own, value = self._own, self._value
        if self._why_not:
            raise InvalidArgumentError(self._why_not)
        for each in self._participants:
            each.prepare()
        next_one = own["_prepared"] = own["_committed"] + 1
        own["_prepared_in"] = self._part.round
        if self._has_news():
            value[0] &= ~_NOBODY_WAITS
        try:
            all_reduce(self._word, _BAND)
        except LOSSES as error:
            value[0] = self._mine
            if not self._part.outlives(error):
                raise
            error.__traceback__ = None  # it would keep the memory of the caller's variables
            if not self._is_due(error):
                raise MembershipChangedError(
                    "ranks were lost before this update; elastic.run retries the step"
                ) from error
            self._has_changed = True
        else:
            own["_committed"] = next_one
            if value[0] != self._mine:
                agreed, value[0] = value[0], self._mine
                self._has_changed = not agreed & _NOBODY_WAITS
                if self._mine & ~agreed & _IS_OVER:
                    self._refuse_early_end()
        self._why_not = _WITHIN
        whole = resolve(None)
        self._held = (whole, *whole.world.subgroups)
        for group in self._held:
            group.hold(_ONLY_MEMORY)

    def _refuse_early_end(self) -> Never:
        self._own["_is_member"] = False
        raise InvalidArgumentError(
            f"rank {self._part.group.own_rank} has returned from its training function after"
            f" {self._own['_committed'] - 1} updates, but other ranks have made one more; all ranks"
            " must make the same updates"
        )

    def _is_due(self, loss: RallypointError) -> bool:
        """Go on in the next round; the update, if it is due, still sees the ranks of this one.

        Others may have made it before the loss, and all must change the state in the same way.
        """
        part = self._part
        before = part.view()
        if not self._state._go_on(loss):
            return False
        self._present = part.view()
        part.show(before)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._why_not = ""
        for group in self._held:
            group.hold("")
        self._held = ()
        if kind is None:
            for each in self._participants:
                each.commit()
            step = self._own.get("step")
            record_step(ELASTIC, step if isinstance(step, int) else self._own["_committed"])
        else:
            self._own["_is_member"] = False
            self._why_not = _HALF_DONE.format(kind.__name__)
        if self._present is not None:
            self._part.show(self._present)
            self._present = None
        if kind is None and self._has_changed:
            self._has_changed = False
            raise MembershipChangedError(
                "ranks were lost or wait to join; elastic.run continues with the new ranks"
            )
