"""This machine's GPUs and what fits into their memory, for the doctor and the server. No torch."""
