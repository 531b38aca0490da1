"""Norms of queries and keys: which rows, divided by what, times which weight."""
