"""The way into a live ``llama_cpp.Llama``. Nothing outside this package imports llama_cpp."""
