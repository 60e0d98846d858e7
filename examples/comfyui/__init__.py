"""Custom nodes of ComfyUI that use a ditile server: `ditile serve`, on this machine or on another one."""

from . import forward_nodes, nodes

NODE_CLASS_MAPPINGS = {**nodes.NODE_CLASS_MAPPINGS, **forward_nodes.NODE_CLASS_MAPPINGS}
NODE_DISPLAY_NAME_MAPPINGS = {**nodes.NODE_DISPLAY_NAME_MAPPINGS, **forward_nodes.NODE_DISPLAY_NAME_MAPPINGS}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
