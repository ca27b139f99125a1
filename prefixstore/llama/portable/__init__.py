"""A store without a ``Llama`` of its own, on llama-cpp-python's ``LlamaState`` objects."""
