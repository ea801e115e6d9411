"""Compile mode: what torch's compiler is given of a parallelized model, and what is refused."""
