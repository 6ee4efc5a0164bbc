"""torch.distributed's API for NumPy arrays, on the engine."""
