"""What a store promises: a reference model, and a state machine that holds every backend to it.

reference.py   the promises, over plain dictionaries: read this one first
machine.py     what users and accidents do to a store, in random order
driver.py      the store under test: the only module that knows the engine
process.py     stores in processes of their own, and what becomes of their files when the power fails
mutations.py   faults put into the engine, to show that the machine finds them
"""
