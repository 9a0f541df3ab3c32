"""The racers of `benchmarks.race`, each a process of its own, and how they are compared."""
