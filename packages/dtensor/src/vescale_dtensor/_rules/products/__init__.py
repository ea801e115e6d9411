"""Functions that contract dims: products, attention, convolution, look-ups, linear algebra."""
