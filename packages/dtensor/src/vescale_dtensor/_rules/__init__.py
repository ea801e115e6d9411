"""Rules by family. Importing this package fills the table; `registry` is the machinery."""
