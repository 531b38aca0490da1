"""Shapes of all values of a graph, in the names that its inputs give their sizes."""
