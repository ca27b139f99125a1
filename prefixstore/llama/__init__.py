"""How states get out of a live ``llama_cpp.Llama`` and back into it.

Beside parts of ``server``, only these modules import llama_cpp when they are loaded.
"""
