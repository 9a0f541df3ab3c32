"""Codenames: a spymaster gives clues, a guesser picks cards, and each has an adapter of its own."""
