"""API keys: which there are, what each may do, and how much."""
