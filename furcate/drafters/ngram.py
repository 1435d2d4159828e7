"""N-gram drafter: what followed the same words earlier in the request, merged into one tree.

Legend: B requests, W width of the token buffer, M matches followed, D levels, P = M * D pool nodes,
N longest suffix compared everywhere, F longest suffix measured at the chosen matches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from furcate.config import DraftOptions
from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.drafters.judge import judge
from furcate.drafters.ngram_calibration import MEASURED, Evidence, Rates
from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = ["Chains", "NgramDrafter", "find_chains", "match_lengths"]

DEPTH = 16  # replayed on copied text, 8 levels are 9 % slower and 24 are 4 % faster
MATCHES = 8  # replayed at a CPU's costs, 4, 8, 12 and 16 are within 1 % of each other


@dataclass(frozen=True, slots=True)
class Chains:
    """The continuations of the best matches, siblings merged; all [B, M, D] but `length_BM`."""

    tokens_BMD: Tensor  # int64
    alive_BMD: Tensor  # bool, the first of all chains that begin with these d tokens
    first_BMD: Tensor  # int64, the chain that speaks for this prefix
    support_BMD: Tensor  # int64, how many chains begin with these d tokens; 0: no chain
    length_BM: Tensor  # int64, tokens of the suffix that match, at most F; 0: no match


class NgramDrafter:
    """Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) as a calibrated tree.

    Where a plain prompt lookup copies the continuation of one match, this one follows several and
    says of each node how likely its path is, so that the engine drafts many nodes inside a copied
    passage and none where only a common word recurs. Its state is a table of rates for all
    requests; no text outlives a round.

    Args:
        options: `depth` levels, `topk` matches, and the range of suffix lengths searched.
        capacity: the slot of the dummy request, from which nothing is learned.
        device: where the rates live.
    """

    light = True
    layers: tuple[int, ...] = ()
    footprint = Footprint()

    def __init__(self, options: DraftOptions, *, capacity: int, device: torch.device) -> None:
        self.depth = DEPTH if options.depth is None else options.depth
        self.matches = MATCHES if options.topk is None else options.topk
        self.pool = self.matches * self.depth
        self.rates = Rates(device)
        self._longest = options.prompt_lookup_max
        self._shortest = options.prompt_lookup_min
        self._dummy = capacity

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """It needs no features."""

    def read(self, view: View, rows: Draft) -> None:
        """The view holds all the text there is; nothing is kept."""

    def propose(self, view: View) -> Proposal:
        """The merged continuations of the best matches of each request's last tokens."""
        chains = self._chains(view)
        tag_BMD = self.rates.tags(_evidence(chains))
        # a chain's node may be another chain's: the path runs through the nodes that stand for it
        log_BK = self.rates.log(view.law.temperature_B)
        step_BMD = log_BK.gather(1, tag_BMD.flatten(1)).view_as(tag_BMD).gather(1, chains.first_BMD)
        value_BMD = torch.where(chains.alive_BMD, step_BMD.cumsum(2), -torch.inf)
        level_D = torch.arange(self.depth, device=value_BMD.device)
        parent_BMD = pad(chains.first_BMD[..., :-1] * self.depth + level_D[:-1], (1, 0), value=-1)
        return Proposal(
            tokens_BP=chains.tokens_BMD.flatten(1),
            parent_BP=parent_BMD.flatten(1),
            depth_BP=(level_D + 1).expand_as(parent_BMD).flatten(1),
            value_BP=value_BMD.flatten(1),
            tag_BP=tag_BMD.flatten(1),
        )

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Correct the rates by the drafted nodes whose parents were accepted."""
        if draft.tag_BR is not None and draft.tag_BR.shape[1] > 1:
            self.rates.update(draft.tag_BR, judge(draft, verdict, view.slot_B != self._dummy))

    def forget(self, slot: int) -> None:
        """Only rates outlive a round, and they belong to no request."""

    def copy_page(self, source: int, target: int) -> None:
        """There is no cache to follow."""

    def _chains(self, view: View) -> Chains:
        tokens_BW = pad(view.tokens_BW, (0, max(0, self.matches - view.tokens_BW.shape[1])))
        at_BM, length_BM = self._best_matches(tokens_BW, view.length_B)
        return find_chains(tokens_BW, view.length_B, at_BM, length_BM, self.depth)

    def _best_matches(self, tokens_BW: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
        """(ends of the M best matches, longest first and then latest; their lengths, 0: none)."""
        width = tokens_BW.shape[1]
        length_BW = match_lengths(tokens_BW, length_B, self._longest)
        at_W = torch.arange(width, device=tokens_BW.device)
        found_BW = torch.where(length_BW >= self._shortest, length_BW * width + at_W, -1)
        found_BM, at_BM = found_BW.topk(self.matches, dim=1)
        length_BM = torch.where(found_BM >= 0, _measure(tokens_BW, length_B, at_BM), 0)
        order_BM = (length_BM * width + at_BM).argsort(dim=1, descending=True)
        return at_BM.gather(1, order_BM), length_BM.gather(1, order_BM)


def match_lengths(tokens_BW: Tensor, length_B: Tensor, longest: int) -> Tensor:
    """How many tokens up to column j equal the last ones up to the root, at most `longest`.

    int64 [B, W]; 0 from the root's column on, since the root matches only itself there.
    """
    width = tokens_BW.shape[1]
    back_N = torch.arange(longest, device=tokens_BW.device)
    tail_BN = _tokens_at(tokens_BW, length_B[:, None] - back_N, missing=-2)
    wide_BW = pad(tokens_BW, (longest - 1, 0), value=-1)
    alive_BW = torch.arange(width, device=tokens_BW.device) < length_B[:, None]
    length_BW = torch.zeros_like(tokens_BW)
    for back in range(longest):
        begin = longest - 1 - back
        alive_BW = alive_BW & (wide_BW[:, begin : begin + width] == tail_BN[:, back, None])
        length_BW += alive_BW
    return length_BW


def find_chains(
    tokens_BW: Tensor, length_B: Tensor, at_BM: Tensor, length_BM: Tensor, depth: int
) -> Chains:
    """The `depth` tokens after each match, and which of them begin alike.

    Only committed tokens are copied: a continuation that reaches the root goes on from its own
    beginning, as a text does that repeats with this period.
    """
    matches = at_BM.shape[1]
    period_BM1 = (length_B[:, None] - at_BM).clamp_min(1)[..., None]
    step_D = torch.arange(depth, device=at_BM.device)
    source_BMD = at_BM[..., None] + 1 + step_D % period_BM1
    live_BM = length_BM > 0
    tokens_BMD = _tokens_at(tokens_BW, source_BMD.flatten(1), missing=0).view_as(source_BMD)
    tokens_BMD = torch.where(live_BM[..., None], tokens_BMD, 0)

    both_BMM1 = (live_BM[:, :, None] & live_BM[:, None, :])[..., None]
    equal_BMMD = (tokens_BMD[:, :, None] == tokens_BMD[:, None]) & both_BMM1
    alike_BMMD = equal_BMMD.long().cumprod(3)
    first_BMD = alike_BMMD.argmax(2)
    own_M1 = torch.arange(matches, device=at_BM.device)[:, None]
    return Chains(
        tokens_BMD=tokens_BMD,
        alive_BMD=live_BM[..., None] & (first_BMD == own_M1),
        first_BMD=first_BMD,
        support_BMD=alike_BMMD.sum(2),
        length_BM=length_BM,
    )


def _measure(tokens_BW: Tensor, length_B: Tensor, at_BM: Tensor) -> Tensor:
    """Match lengths at a few columns, up to F: a rate must know a copied passage from a phrase."""
    back_F = torch.arange(MEASURED, device=at_BM.device)
    tail_BF = _tokens_at(tokens_BW, length_B[:, None] - back_F, missing=-2)
    here_BMF = at_BM[..., None] - back_F
    here = _tokens_at(tokens_BW, here_BMF.flatten(1), missing=-1).view_as(here_BMF)
    return (here == tail_BF[:, None]).long().cumprod(2).sum(2)


def _tokens_at(tokens_BW: Tensor, at_BX: Tensor, *, missing: int) -> Tensor:
    """Tokens at these columns; `missing` where a column lies outside the buffer."""
    last = tokens_BW.shape[1] - 1
    inside_BX = (at_BX >= 0) & (at_BX <= last)
    return torch.where(inside_BX, tokens_BW.gather(1, at_BX.clamp(0, last)), missing)


def _evidence(chains: Chains) -> Evidence:
    matched_B = (chains.length_BM > 0).sum(1)
    above = chains.support_BMD[..., :-1]
    matches = above.shape[1]
    own_M1 = torch.arange(matches, device=above.device)[:, None]
    leads_BMD = pad(chains.first_BMD[..., :-1] == own_M1, (1, 0), value=False)
    leads_BMD[:, 0, 0] = True  # below the root the longest match comes first
    return Evidence(
        length_BM=chains.length_BM,
        support_BMD=chains.support_BMD,
        rivals_BMD=torch.cat([matched_B[:, None, None].expand(-1, matches, 1), above], 2),
        leads_BMD=leads_BMD,
    )
