"""Time and memory of a plan, on the profile of a device."""
