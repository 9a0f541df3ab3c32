"""Backup of a running server, and its restore: ``langchain-art backup`` and ``restore``."""
