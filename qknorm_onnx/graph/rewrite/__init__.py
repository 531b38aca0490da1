"""From a match to new nodes: what is built, proven as a region of its own, and put in place of the old nodes."""
