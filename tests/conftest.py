"""Shared by all tests."""

import torch

# Tiny tensors gain nothing from a second thread, and several test processes would fight over the cores.
torch.set_num_threads(1)
