"""Proves rewrites by running the old and the new subgraph on the same inputs."""
