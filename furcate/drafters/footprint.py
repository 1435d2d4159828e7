"""What a drafter holds of a device's memory, told for any number of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["Footprint", "Weighty", "storages"]

SPELLED_OUT = 16  # bytes a score takes, beside the network's own, where a law is spelled out


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes.

    Args:
        slot: kept for each slot of the target's pages, which a drafter's pools mirror.
        scratch: kept whatever the number of pages.
        work: the most that drafting a round needs for a while.
        weights: bytes of each storage of its networks, by address; some may be the target's too.
    """

    slot: int = 0
    scratch: int = 0
    work: int = 0
    weights: Mapping[int, int] = field(default_factory=dict)


class Weighty(Protocol):
    """A network, as a `torch.nn.Module` is one."""

    def parameters(self) -> Iterator[Tensor]: ...

    def buffers(self) -> Iterator[Tensor]: ...


def storages(*networks: Weighty) -> dict[int, int]:
    """Bytes of each storage that weights lie in, by its address; shared ones count once."""
    found: dict[int, int] = {}
    for network in networks:
        for tensor in _all(network.parameters(), network.buffers()):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _all(*parts: Iterable[Tensor]) -> Iterator[Tensor]:
    for part in parts:
        yield from part
