"""Many conversations on one ``Llama``.

`sessions` has what a server calls. `queue` says whose turn it is, `table` which sessions there are and what each of
them holds, `saved` which of them outlive the process. `session` is what a ``with`` block gets, `place` has the changes
to the ``Llama`` meanwhile, `resuming` brings what a session holds into the context, and `background` runs what must not
block an event loop in a thread of its own.
"""
