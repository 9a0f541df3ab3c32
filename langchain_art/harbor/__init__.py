"""Tasks of Harbor as rollouts: Harbor runs a trial, and its verifier gives the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art.harbor.trials import from_harbor as from_harbor
    from langchain_art.harbor.trials import from_harbor_agent as from_harbor_agent
    from langchain_art.harbor.trials import verifier_reward as verifier_reward
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
