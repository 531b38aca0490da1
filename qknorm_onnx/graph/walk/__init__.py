"""Steps through a graph that every recogniser takes: constants, layouts, groups of heads, names."""
