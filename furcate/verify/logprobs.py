"""Log-probabilities of emitted tokens: of the model's own law, or of the law as sampled.

Legend: B requests, R rows, D levels, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Verdict
from furcate.verify.law import Law
from furcate.verify.process import Lawful

__all__ = ["Logprobs", "processed_logprobs", "raw_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One entry per emitted token; entries past the verdict's count have no meaning."""

    chosen_BD: Tensor  # float32 (float64 for such logits), natural logarithm
    top_id_BDK: Tensor  # int64, likeliest first
    top_BDK: Tensor  # float32


def raw_logprobs(logits_BRV: Tensor, verdict: Verdict, top: int) -> Logprobs:
    """Of softmax(logits) as the model gave them: no bias, penalty, temperature or filter (vLLM's
    `raw_logprobs`)."""
    return _logprobs(_path_rows(logits_BRV, verdict), verdict, top)


def processed_logprobs(processed: Lawful, law: Law, verdict: Verdict, top: int) -> Logprobs:
    """Of the law that tokens are drawn from: after bias, penalties, masks, temperature and filters
    (vLLM's `processed_logprobs`). A token that cannot be drawn has -inf.

    A greedy request has no such law: as in vLLM, it is told at temperature 1, unfiltered.
    """
    logits_BDV = _lifted(_path_rows(processed.logits_BRV, verdict))
    if processed.allowed_BRV is not None:
        allowed_BRV = processed.allowed_BRV.expand_as(processed.logits_BRV)
        logits_BDV = torch.where(_path_rows(allowed_BRV, verdict), logits_BDV, -torch.inf)
    if processed.floor_BR is not None:
        floor_BD1 = _path_rows(processed.floor_BR[:, :, None], verdict)
        logits_BDV = torch.where(logits_BDV >= floor_BD1, logits_BDV, -torch.inf)
    temperature_B = torch.where(law.temperature_B > 0, law.temperature_B, 1.0)
    return _logprobs(logits_BDV / temperature_B[:, None, None], verdict, top)


def _logprobs(logits_BDV: Tensor, verdict: Verdict, top: int) -> Logprobs:
    logprobs_BDV = _lifted(logits_BDV).log_softmax(-1)
    chosen_BD = logprobs_BDV.gather(-1, verdict.emitted_BD[:, :, None])[:, :, 0]
    likeliest = logprobs_BDV.topk(top, dim=-1)
    return Logprobs(chosen_BD, likeliest.indices, likeliest.values)


def _lifted(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _path_rows(rows_BRV: Tensor, verdict: Verdict) -> Tensor:
    """The rows whose choices were emitted, [B, D, V]."""
    request_B1 = torch.arange(len(rows_BRV), device=rows_BRV.device)[:, None]
    return rows_BRV[request_B1, verdict.path_BD]
