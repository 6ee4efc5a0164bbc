"""Key-value stores: where the processes of a job find each other.

The server and the client speak the wire of ``torch.distributed.TCPStore``. Nothing in this package
imports NumPy, torch or asyncio, because the launcher pays for what it imports.
"""
