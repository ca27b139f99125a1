"""A store without an attached ``Llama``, on llama-cpp-python's ``LlamaState`` objects."""
