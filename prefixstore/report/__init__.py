"""A location on one page: what is stored, and how it is used."""
