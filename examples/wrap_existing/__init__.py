"""An agent as published for a hosted model, and the same agent trained: see the difference."""
