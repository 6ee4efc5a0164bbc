"""How long a job has trained: the time in which steps ended that had not been done before.

    round 0   |start|==step 1==|==2==|==3==|          |==4==|==5= killed, restarted from step 3
    round 1   |start|++step 4++|++5++|==step 6==|==7==|

Counted is the time marked by =, of which the share in the elapsed time is the job's goodput. The
first step of new processes is not in it: when it began is not known.
"""

from __future__ import annotations

from rallypoint.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.recorded_steps import RecordedSteps

_NO_CHECKPOINTS = "optimizer"  # a source that counts from 1 in each process


class TrainedTime(Record, kw_only=True):
    """What is known of it, up to some step.

    Attributes:
        trained_s: the time.
        steps: how many steps were done in it.
        most: the highest step so far.
        step, at_s: the last step, and when it ended by the machine's monotonic clock; 0: the
            processes are new, and have done none.
        was_interrupted: something kept the job from training since then: a recovery or a hang.
    """

    trained_s: float = 0.0
    steps: int = 0
    most: int = 0
    step: int = 0
    at_s: float = 0.0
    was_interrupted: bool = False

    def with_new_processes(self) -> TrainedTime:
        """All workers were started anew."""
        return self.__replace__(at_s=0.0, was_interrupted=False)

    def interrupted(self) -> TrainedTime:
        """Something keeps the job from training: not all of the time up to its next step counts."""
        return self.__replace__(was_interrupted=True)

    def after(self, done: RecordedSteps) -> TrainedTime:
        """With the steps that were done meanwhile.

        After an interruption, steps count as much time as others took: how far the interrupted one
        had come is lost.
        """
        trained_s, steps, most = self.trained_s, self.steps, self.most
        step, at_s, was_interrupted = self.step, self.at_s, self.was_interrupted
        if at_s <= 0 and done.source == _NO_CHECKPOINTS:
            most = 0
        for now_s, now in (*done.log, (done.at_ns / 1e9, done.step)):
            if now_s <= at_s:
                continue
            new = now - max(step, most)
            if at_s > 0 and new > 0:
                past_s = (now_s - at_s) * new / (now - step)
                if was_interrupted:
                    past_s = min(past_s, new * trained_s / steps) if steps else 0.0
                else:
                    steps += new
                trained_s += past_s
            most = max(most, now)
            step, at_s, was_interrupted = now, now_s, False
        return self.__replace__(
            trained_s=trained_s,
            steps=steps,
            most=most,
            step=step,
            at_s=at_s,
            was_interrupted=was_interrupted,
        )
