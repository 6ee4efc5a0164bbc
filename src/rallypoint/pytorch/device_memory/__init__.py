"""Calls on tensors of ranks that share a GPU, in its memory: one rank does the work of all.

    every rank    waits for its stream, and says where its tensors are, or "by way of the host"
    the last one  combines and copies in everybody's memory, and waits for its stream
    the engine    all_reduce: how it went

All waiting is on the host, in calls of the engine, which know of lost peers. cuda_memory.py has all
that is CUDA's. Nothing here is imported before ranks share a GPU. See docs/decisions/127.
"""
