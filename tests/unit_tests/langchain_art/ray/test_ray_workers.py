from typing import Any

import pytest

from langchain_art import Trainer
from langchain_art.errors import ConfigError
from langchain_art.ray import RayWorkers
from langchain_art.ray.worker_pool import _check_reach


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, r"got RayWorkers\(count=0\), expected at least 1"),
        ({"needs": {}}, r"expected some of a resource"),
        ({"needs": {"CPU": 0}}, r"expected some of a resource"),
        ({"needs": {"CPU": 1, "GPU": -1}}, r"'GPU': -1"),
        ({"needs": {"CPU": float("nan")}}, r"nan"),
    ],
)
def test_what_is_no_worker_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RayWorkers(**options)


def test_a_trainer_takes_them_by_name_or_with_options() -> None:
    for workers in ("server", "ray", RayWorkers(2), None):
        Trainer("p", workers=workers)
    with pytest.raises(ConfigError, match=r"got workers='rey', expected one of .*'ray'"):
        Trainer("p", workers="rey")  # type: ignore[arg-type]


def test_nodes_on_other_machines_cannot_reach_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    _check_reach("http://localhost:8000/v1", {"10.0.0.1"})
    _check_reach("http://10.0.0.1:8000/v1", {"10.0.0.1", "10.0.0.2"})
    for here in ("localhost", "127.0.0.1", "[::1]"):
        with pytest.raises(ConfigError, match="workers on 2 machines"):
            _check_reach(f"http://{here}:8000/v1", {"10.0.0.1", "10.0.0.2"})
