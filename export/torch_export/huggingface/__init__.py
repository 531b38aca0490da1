"""Readers that take the spec of each attention from a Hugging Face model, one file for each kind of family."""
