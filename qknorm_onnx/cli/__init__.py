"""The command line: the verbs of the public door, for people and for machines."""
