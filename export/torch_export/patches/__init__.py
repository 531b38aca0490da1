"""What is changed in a module or in PyTorch while an export lasts, and put back after it."""
