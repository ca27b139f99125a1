"""What the file of a model says, without llama.cpp: which model it is, and where its prompts are likely to part.

`file` reads GGUF files: their digest, which is the model's identity, their metadata and names. `boundaries` knows from
the vocabulary where messages and paragraphs end. Both serve a ``Llama`` and a llama-server.
"""
