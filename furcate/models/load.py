"""Loads a target network from whatever holds it: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch

from furcate.errors import BadFile, Unsupported
from furcate.models.decoder import Decoder
from furcate.models.gguf import load_gguf
from furcate.models.hf import load_hf

__all__ = ["load_decoder"]

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder at `path`, a directory of safetensors or a .gguf file, in `dtype` on `device`.

    Raises BadFile or Unsupported, naming the file, key or tensor at fault.
    """
    if path.is_dir():
        return load_hf(path, dtype, device)
    if not path.exists():
        raise BadFile("no such file or directory", field=str(path))
    if path.suffix == ".gguf":
        return load_gguf(path, dtype, device)
    if path.suffix in _PICKLES:
        raise Unsupported(
            "a pickle can run any code when loaded; furcate never opens one",
            field=str(path),
            hint="save the model as safetensors and give its directory",
        )
    raise BadFile(
        "is neither a .gguf file nor a directory",
        field=str(path),
        hint="for safetensors, give the directory that holds config.json",
    )
