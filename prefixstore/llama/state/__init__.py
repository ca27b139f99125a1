"""The bytes of llama.cpp's states: views, cuts and joins, parsing, comparing the shape. Pure; no llama.cpp."""
