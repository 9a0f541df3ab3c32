"""Displays of a fit's figures beside its own files: W&B, TensorBoard and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art.trackers.tracker_thread import (
        AdapterFiles as AdapterFiles,
        FitCard as FitCard,
        TrackedRecord as TrackedRecord,
        Tracker as Tracker,
        TrackerRun as TrackerRun,
    )
    from langchain_art.trackers.wandb_tracker import WandbTracker as WandbTracker
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
