"""The server: requests over HTTP become jobs, which wait in a queue for ranks that keep the model loaded."""
