"""The split of the blocks: PipeFusion, its stages, and the loop in micro-steps."""
