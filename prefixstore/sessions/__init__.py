"""Many conversations on one ``Llama``.

`sessions` has what a server calls: the sessions by name, and whose turn it is. `queue` has those who wait, `session`
what a ``with`` block gets, and `moving_window` text that is longer than the context.
"""
