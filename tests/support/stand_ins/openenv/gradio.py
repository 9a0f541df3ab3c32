"""Stands for gradio, which OpenEnv imports for a page that no test opens."""

from unittest.mock import MagicMock

themes = MagicMock()
