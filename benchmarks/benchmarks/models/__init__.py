"""The Llama blocks, and the example's whole step, as each contender has them: by hand, torch's and veScale's."""
