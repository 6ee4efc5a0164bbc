"""Where an agent gets its rounds from: itself, a fixed node 0, other agents, or a plug-in.

`source` is the interface, with one file for each variant. A package adds one with an entry point
(rendezvous/api/rendezvous_handler.py), and is used through `plug_in`; a built-in one has a file
here and a line in `rounds_of`.
"""

from __future__ import annotations

from rallypoint.launch.job import ELASTIC_BACKENDS, Job
from rallypoint.launch.rounds.source import LocalRounds, RoundSource


def rounds_of(job: Job) -> RoundSource:
    """The source of this job's rounds; imports only what it uses."""
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
    from rallypoint.launch.rounds import static_rounds

    return static_rounds.rounds_of(job)
