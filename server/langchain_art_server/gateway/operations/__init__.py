"""Operation of the gateway: the log of requests, metrics, the end in order."""
