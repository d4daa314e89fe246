"""Side-by-side measurements: python -m benchmarks.NAME. Ctrl-C ends each as it ends train.py."""

import configs.ctrl_c  # noqa: F401
