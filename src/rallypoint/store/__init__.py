"""Key-value stores, in which the processes of a job find each other.

Server and client use the wire protocol of ``torch.distributed.TCPStore``. This package imports
neither NumPy, torch nor asyncio, because each import delays the launcher's start.
"""
