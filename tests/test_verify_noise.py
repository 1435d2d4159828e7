"""Philox words, uniform numbers and Gumbel noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from furcate.kernels.philox import Counter, philox, philox_numpy
from furcate.verify.noise import DRAFT, TARGET, gumbel, gumbel_at, gumbel_noise, uniform

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, words.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter: str, key: str, words: str) -> None:
    c, k = words_of(counter), words_of(key)
    got = philox(Counter(*torch.tensor(c)), *torch.tensor(k))
    assert got.tolist() == words_of(words)
    twin = philox_numpy(np.array(c, dtype=np.uint64), np.array(k, dtype=np.uint64))
    assert twin.tolist() == words_of(words)


def test_torch_and_numpy_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (2000, 4), dtype=np.uint64)
    key = rng.integers(0, 2**32, (2000, 2), dtype=np.uint64)
    columns = torch.from_numpy(counter.astype(np.int64)).unbind(1)
    keys = torch.from_numpy(key.astype(np.int64)).unbind(1)
    got = philox(Counter(*columns), *keys).numpy().astype(np.uint64)
    assert np.array_equal(got, philox_numpy(counter, key))


def test_the_first_word_and_the_last_give_finite_noise() -> None:
    u = uniform(torch.tensor([0, 2**32 - 1, 2**32 - 128]))
    assert u.tolist() == [2.0**-33, 1 - 2.0**-24, 1 - 2.0**-24]
    g = gumbel(u)
    assert g[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert g[1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_without_the_clamp_the_last_word_gives_no_number() -> None:
    u = (torch.tensor([2**32 - 1]) * 2 + 1).float() * 2.0**-33
    assert not gumbel(u).isfinite().all()


def test_uniform_is_rounded_once() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 100_000)
    exact = (words.astype(np.float64) + 0.5) * 2.0**-32  # exact in float64
    want = np.minimum(exact.astype(np.float32), np.float32(1 - 2.0**-24))
    assert np.array_equal(uniform(torch.from_numpy(words)).numpy(), want)


def test_noise_is_right_to_four_units_in_the_last_place() -> None:
    rng = np.random.default_rng(2)
    words = np.concatenate([rng.integers(0, 2**32, 50_000), 2 ** np.arange(32)])
    u = uniform(torch.from_numpy(words))
    want = -np.log(-np.log1p(-u.double().numpy()))
    # near g = 0 the outer logarithm turns relative error into absolute error
    unit = np.spacing(np.maximum(np.abs(want), 1.0).astype(np.float32))
    assert (np.abs(gumbel(u).double().numpy() - want) <= 4 * unit).all()


def test_a_plain_logarithm_would_miss_that_bound() -> None:
    u = uniform(2 ** torch.arange(32))
    naive = -(-(1.0 - u).log()).log()
    want = -(-torch.log1p(-u.double())).log()
    assert not torch.allclose(naive.double(), want, rtol=1e-5)


@pytest.mark.parametrize("vocab", [1, 3, 8, 1001])
def test_gathered_noise_has_the_bits_of_the_full_noise(vocab: int) -> None:
    seed_B = torch.tensor([5, -1, 2**62])
    position_BD = torch.tensor([[0, 1], [7, 2], [2**20, 9]])
    choice_B = torch.tensor([0, 1, 2])
    full_BDV = gumbel_noise(seed_B, position_BD, choice_B, vocab)
    ids_BDK = torch.randint(vocab, (3, 2, 50), generator=torch.Generator().manual_seed(0))
    some_BDK = gumbel_at(
        seed_B[:, None, None], position_BD[:, :, None], choice_B[:, None, None], ids_BDK
    )
    assert torch.equal(some_BDK, full_BDV.gather(2, ids_BDK))


def test_noise_is_keyed_as_documented() -> None:
    seed, position, choice, token = 0x1122334455667788, 41, 3, 27
    counter = np.array([token >> 2, position, TARGET, choice], dtype=np.uint64)
    key = np.array([0x55667788, 0x11223344], dtype=np.uint64)
    word = int(philox_numpy(counter, key)[token & 3])
    got = gumbel_noise(torch.tensor([seed]), torch.tensor([[position]]), torch.tensor([choice]), 32)
    assert got[0, 0, token] == gumbel(uniform(torch.tensor([word])))[0]


def test_a_request_has_the_same_noise_in_any_batch() -> None:
    alone = gumbel_noise(torch.tensor([9]), torch.tensor([[4, 5]]), torch.tensor([0]), 777)
    among = gumbel_noise(
        torch.tensor([1, 9]), torch.tensor([[8, 2], [4, 5]]), torch.tensor([1, 0]), 777
    )
    assert torch.equal(alone[0], among[1])


def test_seed_position_choice_and_stream_all_matter() -> None:
    def noise(seed: int, position: int, choice: int, stream: int) -> tuple[float, ...]:
        g = gumbel_noise(
            torch.tensor([seed]), torch.tensor([[position]]), torch.tensor([choice]), 4, stream
        )
        return tuple(g.flatten().tolist())

    base = (5, 6, 0, TARGET)
    changed = [(5 + 2**32, 6, 0, TARGET), (5, 7, 0, TARGET), (5, 6, 1, TARGET), (5, 6, 0, DRAFT)]
    assert len({noise(*key) for key in [base, *changed]}) == 5
