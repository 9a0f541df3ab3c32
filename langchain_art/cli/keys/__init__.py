"""API keys at the command line: the server's own, and those of its tenants."""
