"""The peers of `versus_gpu.py`: transformers in this process, vLLM in one of its own.

    python benchmarks/versus_peers.py DIRECTORY

is that process: a JSON line in, a JSON line out. Needs the dev extra.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furcate.models.decoder import Decoder
from furcate.models.weights import places

__all__ = ["as_transformers", "peers", "write_target"]

Answers = list[list[int]]
Way = Callable[[Sequence[list[int]], int], Answers]
VLLM_MEMORY = 0.2  # of the device: it stands beside our engines
CONTEXT = 2048


def as_transformers(decoder: Decoder) -> Any:
    """The same weights as a transformers model, on the same device."""
    transformers = import_module("transformers")
    spec = decoder.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied_embeddings,
    )
    model = transformers.LlamaForCausalLM(config).to(decoder.dtype)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in places(decoder).items()}
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra, extra
    assert all("lm_head" in name for name in missing), missing
    model.tie_weights()
    return model.to(decoder.device).eval()


def write_target(decoder: Decoder, home: Path) -> None:
    """A directory that transformers and vLLM read."""
    as_transformers(decoder).save_pretrained(home)


def peers(
    open_: ExitStack, home: Path, names: Sequence[str], device: torch.device, python: str
) -> tuple[dict[str, Way], dict[str, str]]:
    """(ways by name, why others are not there); `open_` ends what is started."""
    found: dict[str, Way] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            if name != "vllm":
                found[name] = generating(home, device, static=name == "static")
            elif _has_vllm(python):
                found[name] = open_.enter_context(Vllm(home, python)).answer
            else:
                missing[name] = f"{python} has no vllm"
        except Exception as fault:  # noqa: BLE001  # the others are there all the same
            missing[name] = f"{type(fault).__name__}: {fault}"
    return found, missing


def generating(home: Path, device: torch.device, *, static: bool) -> Way:
    """transformers' `generate`; shorter prompts are padded on the left."""
    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype="auto")
    model = model.to(device).eval()
    cache = {"cache_implementation": "static"} if static else {}

    @torch.inference_mode()
    def answer(prompts: Sequence[list[int]], tokens: int) -> Answers:
        ids_BT, mask_BT = _padded(prompts, device)
        out_BT = model.generate(
            ids_BT,
            attention_mask=mask_BT,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
            **cache,
        )
        told: Answers = out_BT[:, ids_BT.shape[1] :].tolist()
        return told

    return answer


def _padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """To one length for all groups, or the compiled pass would be compiled for each."""
    step = 512 if device.type == "cuda" else 64
    longest = -(-max(len(prompt) for prompt in prompts) // step) * step
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _has_vllm(python: str) -> bool:
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", found], check=False).returncode == 0


class Vllm:
    """A process that answers groups of prompts, a JSON line each."""

    def __init__(self, home: Path, python: str) -> None:
        self._process = subprocess.Popen(
            [python, __file__, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        )

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def answer(self, prompts: Sequence[list[int]], tokens: int) -> Answers:
        """Raises EOFError where the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = json.dumps({"prompts": list(prompts), "tokens": tokens})
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):  # it prints lines of its own too
                told: Answers = json.loads(line.removeprefix(MARK))
                return told
        raise EOFError("vLLM has ended; its last lines say why")


MARK = "answers: "


def serve(home: str) -> None:
    """In vLLM's own process."""
    vllm = import_module("vllm")
    engine = vllm.LLM(
        home,
        skip_tokenizer_init=True,
        gpu_memory_utilization=VLLM_MEMORY,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        law = vllm.SamplingParams(
            temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        answers = engine.generate(prompts, law, use_tqdm=False)
        told = [list(one.outputs[0].token_ids) for one in answers]
        sys.stdout.write(MARK + json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
