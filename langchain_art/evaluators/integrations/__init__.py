"""Adapters of `GroupEvaluator` for other evaluation tools."""
