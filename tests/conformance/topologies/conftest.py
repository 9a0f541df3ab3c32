"""Says why a check fails: pytest rewrites the assertions of modules that it is told of."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.topologies.checks")
