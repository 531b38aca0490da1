"""What is attention but cannot be read: it is named in the report, with a reason, and never passed over."""
