"""Benchmarks: each file prints its figures and writes ``out/bench/NAME.json``."""
