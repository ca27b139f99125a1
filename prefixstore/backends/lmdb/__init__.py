"""Pages in an LMDB environment."""
