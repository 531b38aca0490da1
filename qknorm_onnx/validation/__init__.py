"""Judges a model against float64, with PyTorch's own error in the same type as the budget."""
