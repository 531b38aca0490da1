"""What people read of a validation: rows, a table for the terminal, a page for the browser, JUnit for a server."""
