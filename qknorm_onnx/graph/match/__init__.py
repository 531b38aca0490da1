"""What recognisers read off a graph, as values: tensors with named axes, fragments of a chain, whole matches."""
