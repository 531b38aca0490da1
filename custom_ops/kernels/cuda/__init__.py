"""Triton kernels of both operators, and what compiles them ahead of time into a kernel pack.

The same functions are compiled at run time for PyTorch, ahead of time for ONNX Runtime, and interpreted in tests. They
need Triton; nothing here is imported by the rest of the package.
"""
