"""A location on one page: what is stored, how it is used, and what that says about its size."""
