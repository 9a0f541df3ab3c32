"""Pure functions: rewards to advantages, calls to rows, logits to a loss. No files, no processes.

`advantages`, `samples` and `schedule` import no torch; `loss` imports torch and nothing else.
"""
