"""What happens to q, k and v between their projections and the attention: norms, rotaries, caches, joined streams."""
