"""Comparative measurements: python -m benchmarks.NAME. On Ctrl-C, each exits with code 130 and no traceback."""

import configs.entry_point  # noqa: F401
