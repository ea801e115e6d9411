"""From one layout to another: which steps, at what cost, and how the gradient comes back."""
