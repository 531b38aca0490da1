"""The files that this package writes, tried in other runtimes, and the tables of docs/runtimes.md."""
