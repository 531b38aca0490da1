"""Files that others wrote: an older exporter's, and what tools make of them; the table of docs/coverage.md."""
