"""Lets every row see a few keys more that are its own, after attention over others; and gradients.

Legend: T rows, H query heads, K key/value heads, G = H / K, D head size, J own keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Own", "OwnGradients", "merge_own", "own_gradients"]


@dataclass(frozen=True, slots=True)
class Own:
    """Row t's own keys and values are [:, t]."""

    k_JTKD: Tensor  # dense
    v_JTKD: Tensor  # dense


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """Of the own keys and values."""

    k_JTKD: Tensor
    v_JTKD: Tensor


def merge_own(q_THD: Tensor, own: Own, out_THD: Tensor, lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log of the sum of weights over the keys seen so far and the own ones.

    `out` and `lse` are of the softmax over the keys seen so far; online softmax (Milakov and
    Gimelshein 2018, section 3.1) joins the two.
    """
    score_JTKG = _scores(q_THD, own)
    lse_TKG = _grouped(lse_HT.t(), own)
    new_TKG = torch.cat((lse_TKG[None], score_JTKG)).logsumexp(0)
    out_TKGD = _precisely(out_THD).view(*new_TKG.shape, -1) * (lse_TKG - new_TKG).exp()[..., None]
    weight_JTKG = (score_JTKG - new_TKG).exp()
    out_TKGD = out_TKGD + torch.einsum("jtkg,jtkd->tkgd", weight_JTKG, _precisely(own.v_JTKD))
    return out_TKGD.view(out_THD.shape).to(out_THD.dtype), new_TKG.flatten(1).t().contiguous()


@dataclass(frozen=True, slots=True)
class Merged:
    """The queries, and what `merge_own` gave for them."""

    q_THD: Tensor
    out_THD: Tensor  # dense
    lse_HT: Tensor


def own_gradients(grad_THD: Tensor, merged: Merged, own: Own, dq_THD: Tensor) -> OwnGradients:
    """Gradients with respect to the own keys and values; that of the queries is added to `dq`.

    With P_j = exp(s_j - lse) and c = grad · out: dv_j = P_j grad, ds_j = P_j (grad · v_j - c).
    """
    scale = grad_THD.shape[-1] ** -0.5
    score_JTKG = _scores(merged.q_THD, own)
    shape = (*score_JTKG.shape[1:], -1)
    grad_TKGD, q_TKGD, out_TKGD = (
        _precisely(x).reshape(shape) for x in (grad_THD, merged.q_THD, merged.out_THD)
    )
    weight_JTKG = (score_JTKG - _grouped(merged.lse_HT.t(), own)).exp()
    v_JTKD = _precisely(own.v_JTKD)
    slope_JTKG = torch.einsum("tkgd,jtkd->jtkg", grad_TKGD, v_JTKD) - (grad_TKGD * out_TKGD).sum(-1)
    slope_JTKG = weight_JTKG * slope_JTKG * scale
    dq_TKGD = torch.einsum("jtkg,jtkd->tkgd", slope_JTKG, _precisely(own.k_JTKD))
    dq_THD += dq_TKGD.view(dq_THD.shape)
    dk = torch.einsum("jtkg,tkgd->jtkd", slope_JTKG, q_TKGD)
    dv = torch.einsum("jtkg,tkgd->jtkd", weight_JTKG, grad_TKGD)
    return OwnGradients(dk.to(own.k_JTKD.dtype), dv.to(own.v_JTKD.dtype))


def _scores(q_THD: Tensor, own: Own) -> Tensor:
    k_JTKD = _precisely(own.k_JTKD)
    rows, _, size = q_THD.shape
    q_TKGD = _precisely(q_THD).reshape(rows, k_JTKD.shape[2], -1, size)
    score_JTKG: Tensor = torch.einsum("tkgd,jtkd->jtkg", q_TKGD, k_JTKD) * size**-0.5
    return score_JTKG


def _grouped(x_TH: Tensor, own: Own) -> Tensor:
    return x_TH.reshape(len(x_TH), own.k_JTKD.shape[2], -1)


def _precisely(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
