"""The reproducible mode: sums in an order that does not depend on the mesh."""
