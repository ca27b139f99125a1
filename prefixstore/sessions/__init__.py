"""Many conversations on one ``Llama``.

`sessions` is what a server calls, and keeps track of turns; `llama_queue` holds those who wait, and `session` is what a
``with`` block gets. `table` knows which sessions there are and what each of them holds, also for later processes.
"""
