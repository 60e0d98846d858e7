"""`ditile evaluate`: draws captions with plans and caches, and judges the pictures and the time."""
