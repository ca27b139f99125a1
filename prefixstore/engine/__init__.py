"""Which pages are found, read, written and evicted. It knows nothing of llama.cpp."""
