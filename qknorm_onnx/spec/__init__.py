"""What one QK-Norm attention means, and what it computes. Depends on NumPy only."""
