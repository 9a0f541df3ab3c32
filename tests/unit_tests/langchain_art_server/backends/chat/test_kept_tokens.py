import re
import tracemalloc
from array import array

import pytest

from langchain_art_server.backends.chat import chat_template
from langchain_art_server.backends.chat.chat_template import KeptText, KeptTokens


@pytest.mark.parametrize(("length", "texts"), [(4, 15_000), (40_000, 62)])
def test_what_is_kept_is_bounded_in_bytes_however_short_the_texts_are(
    length: int, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat_template._MAX_KEPT == 32 << 20
    monkeypatch.setattr(chat_template, "_MAX_KEPT", 4 << 20)
    kept = KeptTokens(re.compile("<end>"))
    tracemalloc.start()
    try:
        for number in range(texts):
            kept.keep(f"{number}", KeptText(array("i", bytes(4 * length)), ()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3 << 20 < held < 5 << 20
    last = f"{texts - 1}"
    assert kept.beginnings(f"{last}<end>", ()) and not kept.beginnings("0<end>", ())
