"""From what a person asks for to a runner's call, and from its result to files: for the command line and the server."""
