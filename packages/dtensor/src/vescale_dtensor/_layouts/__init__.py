"""Layouts of a global tensor on a mesh: their states per axis, the mesh, and the geometry of regions."""
