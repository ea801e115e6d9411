"""Input and output: storages, files written and read, the commit of a step, its lease and its retention."""
