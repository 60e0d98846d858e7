"""`ditile bench --suite gpu`: measures a machine with GPUs in one command, correctness first and then speed."""
