"""Side-by-side measurements: python -m benchmarks.NAME. Ctrl-C ends each with 130 and no traceback."""

import configs.entry_point  # noqa: F401
