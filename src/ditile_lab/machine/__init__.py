"""`ditile bench --alone`: each rank of a plan by itself on one device, and the predicted step of the plan."""
