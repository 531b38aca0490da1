"""What every target builds with: the request and its result, heads in their three layouts, whole masks."""
