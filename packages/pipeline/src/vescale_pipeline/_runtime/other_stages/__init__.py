"""The other stages' parameters, as far as code over `model.parameters()` may ask for them."""
