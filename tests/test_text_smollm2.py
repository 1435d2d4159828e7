"""The embedded model's tokenizer against its reference (the model must be fetched before)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from furcate.models.zoo import resolve
from furcate.text.detokenizer import Detokenizer
from furcate.text.tokenizer import Tokenizer, load_tokenizer

# ids that an independent implementation of this tokenizer publishes as its self-check
PUBLISHED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
}
SAMPLES = [
    *(
        "naïve 12345 ½ ① Ⅷ ٣٤",
        "日本語のテキスト",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "it's I'LL we'Ve \u017f'\u017f",
        "",
        " ",
    ),
    *("def f(x):\n    return x**2\n\n\n", "   a  b   \n  \t\t c ", "\r\n\r\n x", "a  1"),
    *("<|im_end|>hey<|endoftext|> <file_sep>x", "\u00a0\u3000\u2028x\u0085y", "e\u0301", "\x00"),
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def reference(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The same vocabulary, cut as the model's own tokenizer.json does: digits, then GPT-2."""
    path: Path = tmp_path_factory.mktemp("reference") / "tokenizer.json"
    smollm2._backend.save(str(path))
    backend = Backend.from_file(str(path))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return backend


def random_text(rng: random.Random) -> str:
    parts = ["the", "'s", "'ll", " ", "  ", "\n", "\t", "<|im_end|>", "٣", "½"]
    draws = (
        lambda: rng.choice(parts),
        lambda: chr(rng.randrange(32, 127)),
        lambda: str(rng.randrange(1000)),
        lambda: chr(rng.choice([rng.randrange(0xA0, 0xD800), rng.randrange(0xF900, 0x3FFFF)])),
    )
    return "".join(rng.choice(draws)() for _ in range(rng.randrange(1, 30)))


def test_published_ids_come_out(smollm2: Tokenizer) -> None:
    assert {text: smollm2.encode(text) for text in PUBLISHED} == PUBLISHED


def test_ids_equal_the_reference_on_many_texts(smollm2: Tokenizer, reference: Backend) -> None:
    rng = random.Random(7)
    texts = [*SAMPLES, *(random_text(rng) for _ in range(1500))]
    ours = [smollm2.encode(text) for text in texts]
    assert ours == [reference.encode(text).ids for text in texts]


def test_cutting_without_the_digits_rule_would_be_seen(
    smollm2: Tokenizer, reference: Backend
) -> None:
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(False)  # transformers' GGUF conversion
    assert smollm2.encode("a  1") != reference.encode("a  1").ids


def test_many_texts_come_back_and_stream(smollm2: Tokenizer) -> None:
    rng = random.Random(8)
    for text in [*SAMPLES, *(random_text(rng) for _ in range(500))]:
        ids = smollm2.encode(text)
        detokenizer = Detokenizer(smollm2, skip_special=False)
        pieces = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
        assert smollm2.decode(ids, skip_special=False) == "".join(pieces) == text


def test_what_the_embedded_model_says_about_itself(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert [smollm2.token_text(i) for i in smollm2.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert smollm2.bos_id == 1
    assert smollm2.encode("x")[0] != smollm2.bos_id
    assert smollm2.special_ids == set(range(17))


def test_a_conversation_reads_as_the_model_was_trained(smollm2: Tokenizer) -> None:
    ids = smollm2.chat_ids([{"role": "user", "content": "Hi"}])
    assert smollm2.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
