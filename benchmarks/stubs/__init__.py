"""Servers in processes of their own that cost their callers nothing but the call."""
