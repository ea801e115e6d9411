"""What happens when a function is called on DTensors."""
