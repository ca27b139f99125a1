"""Rows in a Valkey or Redis server."""
