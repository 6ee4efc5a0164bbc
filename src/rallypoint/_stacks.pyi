"""Types of native/python/stacks.cc."""

def answer(number: int, fd: int, /) -> bool:
    """Have a signal write stacks to `fd`; False: only after faulthandler was registered for it."""
