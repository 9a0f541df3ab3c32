"""The suite of `tests.conformance.suite` against our real server, led by the rule model.

Beside it: graphs in other processes, cancelled runs, graphs drawn at random, and the check of the
rows for the learner by the server's own algorithm.
"""
