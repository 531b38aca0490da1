"""Kernels of the operators by processor: C++ for CPUs, Triton for CUDA."""
