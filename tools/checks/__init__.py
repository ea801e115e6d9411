"""What holds of the tree, read from its sources: layers, changelogs, types, names that siblings use, build targets."""
