"""The canonical nodes `QKNormAttention` and `QKNormRotary`: building and reading them, and their function bodies."""
