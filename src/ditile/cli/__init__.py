"""The command line: `ditile generate`, `decode`, `serve`, `verify`, `plan` and `models`; the lab adds its own."""
