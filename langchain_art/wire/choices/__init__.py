"""Choices within a step's config that have settings of their own: losses, credit, penalties."""
