"""How far rounds get: tokens that a draft of so many levels brings, by what was accepted lately."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PRIOR", "Reach"]

PRIOR = 0.75  # of the nodes below an accepted one, before anything is known
WEIGHT = 8.0  # of what is thought of a depth beforehand, in nodes
RECENT = 1 / 128  # weight of one round at the end


class Tally:
    """Of rounds that had accepted d nodes, how many accepted one more: d is the index."""

    def __init__(self, deepest: int) -> None:
        self.met, self.passed = [0.0] * deepest, [0.0] * deepest

    def note(self, depth: int, passed: bool) -> None:
        """One round that had come to `depth`."""
        self.met[depth] += 1
        self.passed[depth] += passed

    def fade(self) -> None:
        """A round has gone by."""
        self.met = [n * (1 - RECENT) for n in self.met]
        self.passed = [n * (1 - RECENT) for n in self.passed]

    def rate(self, depth: int, thought: float) -> float:
        """Share that passed, where `thought` is what one thinks without having looked."""
        return (self.passed[depth] + WEIGHT * thought) / (self.met[depth] + WEIGHT)


class Reach:
    """A running account of accepted nodes by depth, for all requests of an engine.

    Chances that one node more is accepted hardly change with depth, so what is not known of a depth
    is what is known of the one above it. A draft can be deeper than its levels, where matches stand
    beside a network's; what they bring there is counted apart, for it comes without the level.
    Where nothing is known of that it is as at the depth below, and in the end nothing.

    Args:
        deepest: most nodes that a round accepts.
    """

    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self._drafted = Tally(deepest)  # where the level was among those asked for
        self._beyond = Tally(deepest)  # where it was not

    def note(self, rounds: Sequence[tuple[int, int]]) -> None:
        """(levels of the draft, nodes accepted of it) of each request in a round."""
        for tally in (self._drafted, self._beyond):
            tally.fade()
        for levels, accepted in rounds:
            for depth in range(min(accepted + 1, self._deepest)):
                tally = self._drafted if depth < levels else self._beyond
                tally.note(depth, depth < accepted)

    def tokens(self, levels: int) -> float:
        """Expected tokens of a round whose draft has so many levels, the bonus included."""
        total = chance = 1.0
        rate = PRIOR
        for depth in range(levels):
            rate = self._drafted.rate(depth, rate)
            chance *= rate
            total += chance
        return total + chance * self._below(levels)

    def _below(self, levels: int) -> float:
        """Expected nodes below an accepted one of the last level, from the deepest upwards."""
        nodes = rate = 0.0
        for depth in reversed(range(levels, self._deepest)):
            rate = self._beyond.rate(depth, rate)
            nodes = rate * (1 + nodes)
        return nodes
