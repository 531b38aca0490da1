"""From canonical nodes to what a runtime has: one file for each target."""
