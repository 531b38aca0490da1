"""Rotary embeddings, told by what they do to each channel, and their cos and sin tables."""
