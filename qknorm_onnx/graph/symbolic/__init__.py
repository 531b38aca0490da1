"""Tensors as functions of their index and of the graph's sizes; knows nothing of attention."""
