"""How a global tensor lies on a mesh: layouts, their states per axis, the mesh, and the geometry of regions."""
