"""What is measured: speed, memory and quality of plans and caches, this machine, and predictions beside all of it."""
