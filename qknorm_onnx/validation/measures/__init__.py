"""Numbers that tell how far one array is from another, and how far it may be."""
