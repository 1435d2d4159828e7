"""The loss of drafted rows and its slope: the target's laws once, the draft's in pieces.

Legend: N rows with a loss, C hidden size, V vocabulary, D columns, M rows of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.soft_cross_entropy import Objective, Scores
from furcate.train.loss_vocabulary import Columns
from furcate.train.twins import twin

__all__ = ["Graded", "Teacher", "grade"]


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's laws at the rows with a loss, and the part of its output matrix they need."""

    log_p_ND: Tensor
    bias_D: Tensor  # float32
    output_DC: Tensor

    @classmethod
    def of(cls, last_NC: Tensor, output_VC: Tensor, columns: Columns, most: int) -> Teacher:
        """From the target's final states; at most `most` rows of full scores exist at once."""
        token_D = columns.token_D
        log_probs = twin("log_probs", last_NC.device).log_probs
        log_p_ND = last_NC.new_empty(len(last_NC), len(token_D))
        for start in range(0, len(last_NC), most):
            part_MC = last_NC[start : start + most]
            log_p_ND[start : start + most] = log_probs(
                _precise_product(part_MC, output_VC), token_D, last_NC.dtype
            )
        return cls(log_p_ND, columns.bias_D, output_VC[token_D])


@dataclass(frozen=True, slots=True)
class Graded:
    """Slope of the loss by what the output matrix read, and how good every row was."""

    slope_NC: Tensor
    scores: Scores


def grade(
    final_NC: Tensor, teacher: Teacher, weight_N: Tensor, objective: Objective, most: int
) -> Graded:
    """Compare drafted laws with the target's; at most `most` rows of scores exist at once.

    Args:
        final_NC: what the draft's output matrix reads, detached.
        weight_N: factor of each row's slope, float32.
    """
    score = twin("soft_cross_entropy", final_NC.device).soft_cross_entropy
    rows = min(most, len(final_NC))
    scores_MD = final_NC.new_empty(rows, len(teacher.output_DC))
    slope_NC = torch.empty_like(final_NC)
    parts = []
    for start in range(0, len(final_NC), rows):
        end = min(start + rows, len(final_NC))
        part_MD = scores_MD[: end - start]
        torch.mm(final_NC[start:end], teacher.output_DC.t(), out=part_MD)
        log_p_MD = teacher.log_p_ND[start:end]
        parts.append(score(part_MD, log_p_MD, teacher.bias_D, weight_N[start:end], objective))
        torch.mm(part_MD, teacher.output_DC, out=slope_NC[start:end])
    return Graded(slope_NC, _joined(parts))


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    return Scores(
        torch.cat([part.loss_N for part in parts]),
        torch.cat([part.overlap_N for part in parts]),
        torch.cat([part.agree_N for part in parts]),
    )


def _precise_product(x_MC: Tensor, output_VC: Tensor) -> Tensor:
    """Scores that are not rounded to half precision: near 40 that would cost a tenth of a nat."""
    if x_MC.dtype in (torch.float32, torch.float64):
        return x_MC @ output_VC.t()
    if x_MC.is_cuda:
        return torch.mm(x_MC, output_VC.t(), out_dtype=torch.float32)
    return x_MC.float() @ output_VC.float().t()
