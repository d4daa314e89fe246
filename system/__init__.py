import system.openmp  # noqa: F401 -- before torch, whatever is imported first
