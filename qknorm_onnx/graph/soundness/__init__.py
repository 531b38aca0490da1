"""What makes a model sound, checked before one is read and before one is returned or written. Each check says one line."""
