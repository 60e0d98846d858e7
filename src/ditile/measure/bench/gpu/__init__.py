"""`ditile bench --suite gpu`: what a machine with GPUs is asked, right first and then fast, in one command."""
