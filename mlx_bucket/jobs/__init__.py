"""Jobs over files: readers of rows, sinks for answers, and the run between them."""
