"""What `parallelize` puts on the modules of a model, how that is put on a copy, and how it is taken off."""
