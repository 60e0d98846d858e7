"""The command line: `ditile generate`, `verify`, `plan`, `calibrate`, `bench`, `evaluate` and `models`."""
