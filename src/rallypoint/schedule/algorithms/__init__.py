"""One algorithm family per file; `choose.py` is the only place that lists them."""
