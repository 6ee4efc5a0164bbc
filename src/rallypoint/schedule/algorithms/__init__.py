"""One algorithm family per file; `schedule/catalogue.py` lists them."""
