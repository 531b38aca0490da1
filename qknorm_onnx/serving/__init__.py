"""Folders that hold a decoder with all that serving it takes, and text from them."""
