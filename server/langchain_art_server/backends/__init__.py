"""Samplers and learners. `base` says what they are; every other file here is one of them."""
