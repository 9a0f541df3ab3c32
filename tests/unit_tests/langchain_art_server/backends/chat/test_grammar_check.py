import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.sequences.token_sets import mask_of, of_bits
from langchain_art_server.backends.chat.guided_decoding import GrammarChild

FINE = 'start: "a" | "b"'


def letters_of_bytes() -> tuple[str, dict[str, int]]:
    """A tokenizer with a token for each byte and one that ends a reply."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate([*letters, "<end>"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return raw.to_str(), vocab


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarChild]:
    tokenizer, vocab = letters_of_bytes()
    made = GrammarChild(tokenizer, len(vocab), [vocab["<end>"]])
    yield made
    if made._child is not None:
        made._reap()


def test_a_child_that_was_killed_while_idle_is_replaced(check: GrammarChild) -> None:
    assert check.problem('start: "c"') == ""
    assert check._child is not None
    check._child.kill()
    check._child.wait()
    assert check.problem('start: "d"') == ""


def test_time_is_limited(check: GrammarChild) -> None:
    """By many rules: a pattern that takes so long meets a limit of llguidance's own first."""
    count = 100_000
    rules = "\n".join(f"r{n}: /{n}(.*[a-m]){{5}}.*/" for n in range(count))
    said = check.problem(f"start: {' | '.join(f'r{n}' for n in range(count))}\n{rules}")
    assert "compiling it t" in said


def test_what_a_grammar_allowed_is_computed_again() -> None:
    tokenizer, vocab = letters_of_bytes()
    made = GrammarChild(tokenizer, len(vocab), [vocab["<end>"]], sys.executable)
    try:
        reply = [vocab[letter] for letter in ("a", "c", "<end>")]
        masks = made.masks('start: "ab" | "ac" | "d"', reply)
        assert masks is not None
        allowed = [np.flatnonzero(mask_of(of_bits(one, len(vocab)), len(vocab))) for one in masks]
        assert [one.tolist() for one in allowed] == [
            sorted(vocab[letter] for letter in letters) for letters in ("ad", "bc", ["<end>"])
        ]
        short = made.masks('start: "ab" | "d"', reply)
        assert short is not None and len(short) == 1  # it forbids the second
    finally:
        made._reap()


def test_a_python_that_has_no_compiler_is_named() -> None:
    tokenizer, vocab = letters_of_bytes()
    made = GrammarChild(tokenizer, len(vocab), [vocab["<end>"]], "/bin/true")
    with pytest.raises(ArtError, match="cannot be started"):
        made.masks(FINE, [1])
