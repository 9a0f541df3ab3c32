import re
import tracemalloc
from array import array

import pytest

from langchain_art_server.backends.chat.chat_template import KeptText, KeptTokens


@pytest.mark.parametrize(("length", "texts"), [(4, 120_000), (40_000, 500)])
def test_what_is_kept_is_bounded_in_bytes_however_short_the_texts_are(
    length: int, texts: int
) -> None:
    kept = KeptTokens(re.compile("<end>"))
    tracemalloc.start()
    try:
        for number in range(texts):
            kept.keep(f"{number}", KeptText(array("i", bytes(4 * length)), ()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 24 << 20 < held < 40 << 20
    last = f"{texts - 1}"
    assert kept.beginnings(f"{last}<end>", ()) and not kept.beginnings("0<end>", ())
