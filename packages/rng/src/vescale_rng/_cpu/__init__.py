"""The numbers that torch draws on a CPU: mt19937 as a tape of words, read at any place."""
