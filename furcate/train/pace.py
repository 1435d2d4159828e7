"""Keeps the host from running far ahead of the device, so that its clock means something."""

from __future__ import annotations

from collections import deque

import torch

__all__ = ["Pace"]


class Pace:
    """Lets at most `ahead` steps wait on the device.

    Args:
        device: where steps run; on a CPU nothing ever waits.
        ahead: enough that the device never idles.
    """

    def __init__(self, device: torch.device, ahead: int = 2) -> None:
        self._device = device
        self._ahead = ahead
        self._waiting: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """A step has been launched; wait for the one that was launched `ahead` steps before."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._waiting.append(event)
        if len(self._waiting) > self._ahead:
            self._waiting.popleft().synchronize()
