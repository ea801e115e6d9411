"""What a checkpoint is made of: boxes, dtypes, plain values, the number of a step; and how text and JSON are bound."""
