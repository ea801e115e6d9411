"""Training by a configuration: `vescale train config.toml`."""
