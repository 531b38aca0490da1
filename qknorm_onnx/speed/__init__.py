"""Measures the native kernels beside what else can run the same attention, in one interleaved run, results checked first."""
