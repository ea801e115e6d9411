"""Elements of a checkpoint: boxes, dtypes, plain values, step numbers; and the limits on text and JSON."""
