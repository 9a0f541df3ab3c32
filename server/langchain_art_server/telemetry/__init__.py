"""Telemetry for an operator of a running server: records of the log, numbers, spans."""
