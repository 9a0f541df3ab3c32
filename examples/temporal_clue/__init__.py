"""Temporal Clue: who did it, where, when and with what? Puzzles with exactly one solution."""
