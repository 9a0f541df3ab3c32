"""Tic-tac-toe: a policy that plays itself and its older versions, measured against minimax."""
