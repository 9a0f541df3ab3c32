"""A Langfuse server on loopback, as SDK 5 meets it: traces and scores in, observations out."""

from tests.support.langfuse_server.server import LangfuseServer

__all__ = ["LangfuseServer"]
