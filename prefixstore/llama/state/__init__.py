"""The bytes that llama.cpp writes of a state: views, cuts and joins, parsing, comparing the shape. Pure."""
