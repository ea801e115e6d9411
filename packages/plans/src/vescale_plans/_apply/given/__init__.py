"""What `parallelize` is given: looked at before anything is changed, and what becomes of its objects."""
