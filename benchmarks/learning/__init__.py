"""The parts of ``benchmarks/learner.py``."""
