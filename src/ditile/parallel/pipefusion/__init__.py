"""The axis of blocks: PipeFusion, its schedule and its stages."""
