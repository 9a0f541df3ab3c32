"""The schema: how a database is opened, checked, and brought to this version."""
