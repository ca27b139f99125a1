"""How states get out of a live ``llama_cpp.Llama`` and back into it. No other package imports llama_cpp."""
