"""Rows in an LMDB environment."""
