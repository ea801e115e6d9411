"""Installs `parallelize`'s parts on the modules of a model and on copies, and takes them off."""
