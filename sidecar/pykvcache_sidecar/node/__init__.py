"""The node agent: one process per node that prepares pool directories, mounts them into pods and cares for them."""
