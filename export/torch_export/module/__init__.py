"""What a module brings along: sound weights, and the names of its parts."""
