"""Lists of prompts into a store, each shared prefix computed once."""
