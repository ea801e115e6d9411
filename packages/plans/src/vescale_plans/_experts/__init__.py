"""Expert parallelism: the experts of a mixture spread over a mesh axis, in any unmodified model."""
