"""Groups of other backends behind the same calls: gloo, nccl, hccl, mpi, and packages' own.

    arguments -> blocks of flat memory -> the backend's library -> results, errors of base/errors.py
                 library_calls.py                 one Delegate per library

Arguments are checked as for the engine before a library sees them. Calls that a library does not
support are refused by name. docs/guides/backends.md has the table, docs/decisions/088-delegates.md
the reasons.
"""
