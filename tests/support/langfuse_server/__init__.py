"""A Langfuse server on loopback, as SDK 5 meets it: traces and scores in, observations out.

What it does was seen at a self-hosted server of version 4.16 with SDK 5.0.4 (2026-11-20), with a
relay in front that takes what 4.59 takes, or is documented; where it matters a comment says which.
"""

from tests.support.langfuse_server.server import LangfuseServer

__all__ = ["LangfuseServer"]
