"""Many conversations on one ``Llama``.

`sessions` has what a server calls, and whose turn it is; `queue` those who wait, and `session` what a ``with`` block
gets. `table` knows which sessions there are and what each of them holds, also for later processes.
"""
