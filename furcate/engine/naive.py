"""The slow loop that stays for ever: plain decoding with dense keys, no pages, no tree, no batch.

It shares with the engine the decoder and the sampling law, and nothing else; the engine's streams
are judged by it. Legend: T rows, S columns, H heads, K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furcate.config import SamplingParams
from furcate.models.decoder import Attend, Decoder
from furcate.verify.law import Law, needs_of, plain_rows
from furcate.verify.process import Processed, choose, process

__all__ = ["Judge", "law_of", "naive"]


@torch.inference_mode()
def naive(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams, stop_ids: Sequence[int] = ()
) -> list[int]:
    """The tokens that plain decoding emits after `prompt`, the stop id included.

    Needs `params.seed` and `params.max_tokens`; stop strings are not its business.
    """
    assert params.seed is not None and params.max_tokens is not None
    judge = Judge(decoder, prompt, params, stop_ids)
    while len(judge.output) < params.max_tokens:
        processed = judge.processed(judge.next_logits(), params)
        token = int(choose(processed).token_BR)
        judge.append(token)
        if token in stop_ids:
            break
    return judge.output


class Judge:
    """Plain decoding one step at a time; also walks a given stream (teacher forcing)."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.decoder = decoder
        self.prompt = list(prompt)
        self.params = params
        self.stop_ids = tuple(stop_ids)
        self.output: list[int] = []
        self._unscored = list(prompt)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}

    def next_logits(self) -> Tensor:
        """The target's logits after all tokens so far, [1, 1, V]; once per position."""
        device = self.decoder.device
        length = len(self.prompt) + len(self.output)
        start = length - len(self._unscored)
        hidden_TC = self.decoder(
            torch.tensor(self._unscored, device=device),
            torch.arange(start, length, device=device),
            self._attend(),
        )
        self._unscored = []
        return self.decoder.logits(hidden_TC[-1:])[None]

    def processed(self, logits_BRV: Tensor, params: SamplingParams) -> Processed:
        """Those logits under a law, `params`, after the tokens so far."""
        device = logits_BRV.device
        tokens = self.prompt + self.output
        root_B, length_B = torch.tensor([[tokens[-1]], [len(tokens) - 1]], device=device)
        law = law_of(params, self.prompt, self.output, self.stop_ids, logits_BRV)
        return process(logits_BRV, law, plain_rows(root_B, length_B))

    def append(self, token: int) -> None:
        """Commit one token."""
        self.output.append(token)
        self._unscored.append(token)

    def _attend(self) -> Attend:
        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            if layer in self._keys:
                k_old, v_old = self._keys[layer]
                k_TKD, v_TKD = torch.cat([k_old, k_TKD]), torch.cat([v_old, v_TKD])
            self._keys[layer] = (k_TKD, v_TKD)
            return _attention(q_THD, k_TKD, v_TKD)

        return attend


def _attention(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    """Spelled-out attention of the last T of S positions, each over itself and all before it."""
    rows, columns = len(q_THD), len(k_SKD)
    group = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHD = (x.repeat_interleave(group, dim=1) for x in (k_SKD, v_SKD))
    score_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) / q_THD.shape[-1] ** 0.5
    at_T = torch.arange(columns - rows, columns, device=q_THD.device)
    later_TS = torch.arange(columns, device=q_THD.device) > at_T[:, None]
    weight_HTS = score_HTS.masked_fill(later_TS, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weight_HTS, v_SHD)


def law_of(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
    logits: Tensor,
) -> Law:
    """The law of one request after `output`, counted afresh from its tokens."""
    vocab, device = logits.shape[-1], logits.device
    assert params.seed is not None
    seed = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed

    def one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    bias_BV = torch.zeros(1, vocab, device=device)
    for token, bias in params.logit_bias.items():
        bias_BV[0, token] = bias
    allowed_BV = torch.zeros(1, vocab, dtype=torch.bool, device=device)
    allowed_BV[0, list(params.allowed_token_ids or ())] = True
    prompt_BV = torch.zeros(1, vocab, dtype=torch.bool, device=device)
    prompt_BV[0, list(prompt)] = True
    counted = torch.tensor(list(output), dtype=torch.int64, device=device)
    whole = torch.int64
    return Law(
        needs=needs_of([params], vocab),
        temperature_B=one(params.temperature),
        seed_B=one(seed, whole),
        choice_B=one(0, whole),
        output_B=one(len(output), whole),
        stop_BS=torch.tensor([list(stop_ids) or [-1]], device=device),
        top_k_B=one(params.top_k, whole),
        top_p_B=one(params.top_p),
        min_p_B=one(params.min_p),
        repetition_B=one(params.repetition_penalty),
        presence_B=one(params.presence_penalty),
        frequency_B=one(params.frequency_penalty),
        min_tokens_B=one(params.min_tokens, whole),
        bias_BV=bias_BV if params.logit_bias else None,
        allowed_BV=allowed_BV if params.allowed_token_ids is not None else None,
        prompt_BV=prompt_BV,
        counts_BV=torch.bincount(counted, minlength=vocab)[None],
    )
