"""The memory that calls are given: arrays, tensors, what peers may read; nothing is sent here."""
