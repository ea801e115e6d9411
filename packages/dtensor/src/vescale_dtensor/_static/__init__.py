"""Static mode's half in the engine: what a call did to plain local tensors, compared, unwrapped and compiled."""
