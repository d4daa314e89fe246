"""Side-by-side measurements: python -m benchmarks.NAME. Ctrl-C ends each with 130 and no traceback."""

import system.interrupts  # noqa: F401
