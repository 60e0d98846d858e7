"""The server: requests over HTTP become jobs, which wait in a queue and are drawn by groups of ranks that live on."""
