"""Where bytes go and come from: storages, files written and read, the commit of a step, its lease and its retention."""
