"""Formulas that client and server share: intervals, comparisons, costs, calls by node."""
