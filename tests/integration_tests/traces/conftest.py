"""Shared with the other rooms that read Langfuse."""

from tests.support.reviewed_runs import langfuse, make_runs

__all__ = ["langfuse", "make_runs"]
