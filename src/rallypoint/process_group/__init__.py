"""torch.distributed's API for NumPy arrays, on the engine.

    calls | formation      what each call does | how groups form, and end
        delegated          other libraries behind the same calls
    work   groups          calls as records, their handles | who is in which group
    planning   operators   which program serves a call | how items are combined
         arrays            arrays, tensors, and memory that peers read

Rooms know only what is below them.
"""

from __future__ import annotations

DEFAULT_GROUP = "default group"  # what people call it
