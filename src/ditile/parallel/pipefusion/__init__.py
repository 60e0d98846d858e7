"""The axis of blocks: PipeFusion, its stages, and the loop in micro-steps."""
