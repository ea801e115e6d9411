"""What is sent between ranks, how it is waited for, and who is told about it."""
