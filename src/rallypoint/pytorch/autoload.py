"""Registers the backend "rallypoint" with PyTorch, which calls `autoload` at the end of its import.

The entry point `torch.backends` names it. An error here would break every `import torch` on the
machine, so it never raises; expensive work waits until the first group is made.
"""

from __future__ import annotations

import contextlib
import os
import sys

BACKEND = "rallypoint"
# Each process started by another launcher has one of these variables (cluster/environments).
STARTERS = (
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "PMI_RANK",
    "FLUX_JOB_ID",
    "SLURM_JOB_ID",
)


def autoload() -> None:
    """Register the backend; called by PyTorch. Never fails: errors go to stderr."""
    try:
        register()
    except Exception as error:
        with contextlib.suppress(Exception):
            print(
                f"rallypoint: PyTorch's backend {BACKEND!r} is not available: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )


def register() -> None:
    """Register the backend, where autoload is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0)."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    if os.environ.get("RALLYPOINT_AS_GLOO"):
        from rallypoint.pytorch import as_gloo

        as_gloo.install()
    if any(name in os.environ for name in STARTERS):
        from rallypoint.pytorch import launched

        launched.install()
    template = sys.modules.get("rallypoint.base.template")
    if template is not None and template.is_template:
        template.in_worker.append(_record_in_worker)
    else:
        _record_in_worker()


def _record_in_worker() -> None:
    hook = sys.modules.get("rallypoint.base.worker_hook")  # only in workers
    if hook is not None and hook.flight_record:
        from rallypoint.pytorch import optimizer_steps, other_backends

        other_backends.install()
        optimizer_steps.install()


def _create(options: object, backend_options: object) -> object:
    from rallypoint.pytorch.backend import create

    return create(options, backend_options)
