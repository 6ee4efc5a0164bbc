"""Where an agent gets its rounds from: itself, a fixed node 0, other agents, or somebody's package.

`source` is the interface; one file for each way. To add one: a package needs only an entry point
(rendezvous/api/registry.py), and comes through `plug_in`; what is built in has a file here and a
line in `rounds_of`.
"""

from __future__ import annotations

from rallypoint.launch.job import ELASTIC_BACKENDS, Job
from rallypoint.launch.rounds.source import LocalRounds, RoundSource


def rounds_of(job: Job) -> RoundSource:
    """Where this job's agent gets its rounds from; a launch imports only what it uses.

    Raises:
        HostError: the endpoint cannot be found or reached.
        InvalidArgumentError: a configuration that cannot be.
    """
    if job.rendezvous is not None:
        if job.rendezvous.endpoints[0].is_directory:
            from rallypoint.launch.rounds import shared_directory

            return shared_directory.rounds_of(job, job.rendezvous)
        if job.rendezvous.backend in ELASTIC_BACKENDS:
            from rallypoint.launch.rounds import elastic

            return elastic.rounds_of(job, job.rendezvous)
        from rallypoint.launch.rounds import plug_in

        return plug_in.rounds_of(job, job.rendezvous)
    if job.nodes.count == 1:
        return LocalRounds(job)
    from rallypoint.launch.rounds import static

    return static.rounds_of(job)
