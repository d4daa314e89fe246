"""torch.compile where it pays, and eager execution where it cannot work."""

import logging
from contextlib import AbstractContextManager

import torch

from model.gpt import GPT
from system.errors import UserError

logger = logging.getLogger(__name__)


def maybe_compile(network: GPT, choice: str, device: torch.device, precision: AbstractContextManager) -> None:
    """Compiles the network in place, keeping the names of its weights; falls back to eager with one warning.

    Args:
        choice: "true", "false", or "auto", which compiles on GPUs only: for short CPU runs it has not been measured
            whether the gain exceeds the compile time.
        precision: context in which training runs, so that the network is compiled for it.

    Raises:
        UserError: `choice` is something else.
    """
    choice = str(choice).lower()
    if choice not in ("auto", "true", "false"):
        raise UserError(f"compile is {choice!r}, but must be auto, true or false.")
    if choice == "false" or (choice == "auto" and device.type != "cuda"):
        return
    logger.info("compiling the network, which can take a minute")
    network.to(device).compile()
    ids = torch.zeros(2, network.config.context_length, dtype=torch.long, device=device)  # (B, T)
    try:  # a missing compiler shows only at the first call
        with precision:
            loss = network(ids).float().sum()
        loss.backward()
    except Exception as error:  # noqa: BLE001 -- the backend may raise anything
        network._compiled_call_impl = None
        logger.warning(f"warning: torch.compile does not work here ({type(error).__name__}); training without it.")
    network.zero_grad()
