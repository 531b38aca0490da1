"""Recognisers: small functions from a value of a graph to a fragment of attention, or to the reason why not."""
