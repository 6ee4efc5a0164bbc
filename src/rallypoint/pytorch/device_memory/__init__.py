"""Calls on tensors of ranks that share a GPU, in its memory: one rank does the work of all.

    every rank    waits for its stream
    the engine    all_gather: where each rank's tensors are, or "by way of the host"
    one rank      combines and copies in everybody's memory, and waits for its stream
    the engine    broadcast by that rank: it is done

All waiting is on the host, in calls of the engine, which know of lost peers. cuda_memory.py has all
that is CUDA's. Nothing here is imported before ranks share a GPU. See docs/decisions/127.
"""
