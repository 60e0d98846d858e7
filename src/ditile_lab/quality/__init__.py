"""`ditile evaluate`: generates captions with plans and caches, and judges the images and the time."""
