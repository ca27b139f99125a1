"""The schema of SQL stores, step by step."""
