"""The inputs of a module as graph inputs: names, explicit tensors, dynamic shapes."""
