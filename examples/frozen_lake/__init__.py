"""Frozen Lake, an environment of TextArena: a pretrained model learns to walk around the holes."""
