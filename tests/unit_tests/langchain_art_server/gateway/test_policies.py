"""A policy whose versions have no room in the sampler's memory is refused."""

from pathlib import Path

import pytest

from langchain_art.errors import QuotaExceeded
from langchain_art_server.gateway.policies import require_memory


def test_a_policy_needs_memory_for_the_versions_that_stay_loaded(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(3 << 20))
    require_memory("p", tmp_path, None)
    require_memory("p", tmp_path, 10.0 * (3 << 20))
    words = r"'p' has adapters of 3 MiB, of which .* hold 10 more at once, .* has 29 MiB free"
    with pytest.raises(QuotaExceeded, match=words):
        require_memory("p", tmp_path, 29.0 * (1 << 20))
