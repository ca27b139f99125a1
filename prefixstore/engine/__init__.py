"""Which pages are found, read, written and evicted. Knows no llama.cpp."""
