"""`ditile bench --alone`: each rank of a plan by itself on one device, and the step that the plan should take."""
