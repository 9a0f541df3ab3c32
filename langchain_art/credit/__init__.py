"""Rewards of runs to an advantage and a loss weight for every call. No torch, no numpy.

The server trains by it, and the client asks it what the server will do::

    batch_plan    what is excluded (no reward, staleness, truncation), credit assignment, weights
    ├── candidates           calls and runs as input; what is compared; the decision on a call
    └── credit_assignment    what is compared: runs, nodes, turns, states, scores; zero variance;
                             a reward against the others of its group
"""
