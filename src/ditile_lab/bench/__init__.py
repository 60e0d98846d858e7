"""`ditile bench`: measures seconds and memory of plans and caches side by side, and compares them with predictions."""
