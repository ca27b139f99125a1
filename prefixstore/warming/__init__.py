"""Computes lists of prompts into a store, each shared prefix once.

In the order of the data: `prompts` reads files and makes tokens, `context_size` says how long a context they need,
`prompt_trie` sorts them and divides them into parts, `job` finds what is already stored and computes the rest, and
`leases` keep several jobs from computing the same part. `estimate` predicts a job; `report` holds what a job shows.
"""
