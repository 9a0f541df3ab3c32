"""Savers of checkpoints that are killed with -9, one script for all; see `benchmarks.kills`."""
