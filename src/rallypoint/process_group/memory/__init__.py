"""The memory that calls are given: arrays, tensors, memory that peers read; sends nothing."""
