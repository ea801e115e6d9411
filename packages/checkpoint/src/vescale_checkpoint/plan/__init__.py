"""Who holds what and who writes what, which bytes a load needs, and where they go: from states to plans. Pure."""
