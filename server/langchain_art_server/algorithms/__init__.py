"""The algorithms of a training step as pure functions: no files, no processes.

`sequences`, without torch, makes rows of calls and divides them; `loss`, torch only, makes a step's
loss of logprobs.
"""
