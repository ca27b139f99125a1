"""Requests recorded, and replayed in the engine with other budgets and policies."""
