"""What an operator has of the gateway: each request told of, metrics, the end in order."""
