"""What an operator sees of a running server: records of the log, numbers, spans."""
