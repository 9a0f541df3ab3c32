"""Stands for anthropic, of which verifiers imports two types for agents that no test has."""
