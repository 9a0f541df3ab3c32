"""Environments of other libraries, with a graph as the agent: scenarios and a rollout of one.

Each function takes an environment and a compiled graph, whose state has ``messages``. It gives an
`Environment`, whose parts are what `Trainer.fit` and `gather` take. A library is imported when its
function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art.environments.parts import Environment as Environment
    from langchain_art.environments.from_openenv import from_openenv as from_openenv
    from langchain_art.environments.from_reasoning_gym import (
        from_reasoning_gym as from_reasoning_gym,
    )
    from langchain_art.environments.from_textarena import from_textarena as from_textarena
    from langchain_art.environments.from_verifiers import from_verifiers as from_verifiers
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
