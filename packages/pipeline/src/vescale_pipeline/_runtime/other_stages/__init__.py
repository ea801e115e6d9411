"""What the other stages hold, as far as code over `model.parameters()` may ask of it."""
