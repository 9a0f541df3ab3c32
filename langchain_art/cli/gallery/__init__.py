"""The repository's examples: their demos, and projects made from them."""
