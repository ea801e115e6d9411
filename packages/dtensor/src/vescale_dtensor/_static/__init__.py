"""Static mode's half in the engine: what a call did to plain local tensors, compared, erased and compiled."""
