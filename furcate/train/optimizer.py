"""Precise copies of a head's weights, and the optimisers that move them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from furcate.train.recipe import Recipe

__all__ = ["Masters"]


class Masters:
    """float32 masters of weights that work in a shorter type; matrices may go by Muon.

    Args:
        weights: the working weights by name; they are overwritten after each step.
        recipe: of the run.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], recipe: Recipe) -> None:
        self._working = list(weights.values())
        self._clip = recipe.clip
        self._names = list(weights)
        self._masters = [
            nn.Parameter(x.detach().to(_master_dtype(x.dtype), copy=True)) for x in self._working
        ]
        muon = [x for x in self._masters if recipe.optimizer == "muon" and x.ndim == 2]
        plain = [x for x in self._masters if not any(x is y for y in muon)]
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if plain:
            betas = (recipe.beta1, recipe.beta2)
            self._optimizers["adamw"] = torch.optim.AdamW(
                plain, recipe.rate, betas, weight_decay=recipe.weight_decay, fused=True
            )
        if muon:
            # with this scale of its steps one rate and decay serve both (Liu et al. 2025, 2.2)
            self._optimizers["muon"] = torch.optim.Muon(
                muon, recipe.rate, recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def step(self, rate: float) -> Tensor:
        """One step from the gradients of the working weights, which are cleared.

        Returns the norm of the gradient before it was clipped; nothing waits for the device.
        """
        for master, working in zip(self._masters, self._working, strict=True):
            assert working.grad is not None
            master.grad = working.grad.to(master.dtype)
            working.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._write_back()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The masters by name."""
        return {n: x.detach() for n, x in zip(self._names, self._masters, strict=True)}

    def working(self) -> dict[str, Tensor]:
        """The weights that the head works with, by name."""
        return {n: x.detach() for n, x in zip(self._names, self._working, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """What the optimisers remember, by name."""
        found = {}
        for kind, optimizer in self._optimizers.items():
            for index, entry in optimizer.state_dict()["state"].items():
                for key, value in entry.items():
                    found[f"{kind}/{index}/{key}"] = value
        return found

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Go on from these masters, and from what the optimisers remembered where that is known."""
        with torch.no_grad():
            for name, master in zip(self._names, self._masters, strict=True):
                master.copy_(weights[name])
        self._write_back()
        if state is None:
            return
        for kind, optimizer in self._optimizers.items():
            entries: dict[int, dict[str, Any]] = {}
            for name, value in state.items():
                of, index, key = name.split("/")
                if of == kind:
                    entries.setdefault(int(index), {})[key] = value
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _write_back(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self._working), list[Tensor](self._masters))


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
