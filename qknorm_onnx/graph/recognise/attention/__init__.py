"""Where queries meet keys: the softmax and what lies around it, or a runtime's attention operator, as one `Core`."""
