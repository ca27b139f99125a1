"""Every architecture of llama.cpp as a tiny generated model, and what is saved for each: ``python -m tests.models``."""
