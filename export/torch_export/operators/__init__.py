"""Our operators in PyTorch: the torch operators, their eager and Triton forms, modules made of them, their translation."""
