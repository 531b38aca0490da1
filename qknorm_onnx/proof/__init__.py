"""Proves rewrites by running the old and the new subgraph on the same inputs."""

from qknorm_onnx.proof.region_prover import RegionProver

__all__ = ["RegionProver"]
