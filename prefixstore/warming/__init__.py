"""Computes lists of prompts into a store, each shared prefix once.

In the order of the data: `prompt_list` reads files, makes tokens, and sorts them, and `job` finds what is
already stored and computes the rest, or counts that.
"""
