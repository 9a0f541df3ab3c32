from dataclasses import replace

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatRequest, Sampling
from langchain_art_server.backends.ipc import process_sampler
from langchain_art_server.backends.ipc.process_sampler import PoisonRequests

POISON = ChatRequest(id="a", messages=[{"role": "user", "content": "x"}], adapter="p@1")


def test_a_request_that_ran_beside_others_is_refused_only_when_they_are_cleared() -> None:
    suspects = PoisonRequests()
    for index in range(16):  # the choices of one request die one death
        suspects.add(replace(POISON, id=f"a:{index}"), 0)
    suspects.check(POISON)
    suspects = PoisonRequests()
    others = [replace(POISON, sampling=Sampling(seed=index)) for index in range(4)]
    for death in (1, 2, 3):
        for request in (POISON, *others):
            suspects.add(replace(request, id=f"{death}", adapter=f"p@{death}"), death)
    for request in (POISON, *others):  # any of them may be the one
        assert suspects.check(request)
    for request in others:
        suspects.answered(request)
    with pytest.raises(InvalidRequest, match="ended 3 times"):
        suspects.check(POISON)
    assert not suspects.check(others[0])


def test_suspects_are_few_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sampler, "_MAX_KNOWN", 3)
    suspects = PoisonRequests()
    for death in range(8):
        suspects.add(POISON, death)
    assert len(suspects._deaths) == 3
    monkeypatch.setattr(process_sampler, "_REMEMBERED", -1.0)
    assert not suspects
    assert not suspects._deaths
