"""`ditile bench`: measures seconds and memory of plans and caches side by side, beside what was predicted."""
