"""Masks as conditions on the indices of queries and keys: causality, windows, and what must stay a tensor."""
