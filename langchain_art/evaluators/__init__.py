"""Evaluators: Runnables that score the runs of a group beside each other."""
