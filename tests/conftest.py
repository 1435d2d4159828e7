"""What all tests share: poisoned memory, threads, the embedded model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EMBEDDED = "smollm2-135m"


def _called_from_furcate() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).split(".")[0] == "furcate"


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = allocate(*args, **kwargs)
        if _called_from_furcate() and made.is_floating_point():
            made.fill_(float("nan"))
        return made

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """Inside furcate `torch.empty` gives NaN, so reading what nobody wrote cannot go unnoticed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_small_models() -> Iterator[None]:
    """Tiny matrices lose more to handing work between threads than they gain.

    Processes that a test starts have this worker's cores, not those of all workers.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(_cores()))
        yield


@pytest.fixture
def all_cores() -> Iterator[None]:
    """For tests on the embedded model, where threads pay: all that no other worker has."""
    before = torch.get_num_threads()
    torch.set_num_threads(_cores())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Path of the embedded model's file; `make test` fetches it."""
    from furcate.errors import FurcateError
    from furcate.models.zoo import resolve

    try:
        return Path(resolve(EMBEDDED))
    except FurcateError as err:
        pytest.fail(f"the embedded model is not here: {err}. Run `make test`, or `make model`.")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random llama and its tokenizer."""
    from cli_runs import tiny_model_in

    return tiny_model_in(tmp_path_factory.mktemp("tiny") / "model")


def _cores() -> int:
    """This worker's share; without pytest-xdist there is one worker, and its name is not told."""
    every = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, every // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
