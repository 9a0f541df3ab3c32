"""Triage: a router sends customers' messages to departments; a pretrained model learns it."""
