"""The async client: the one source of both clients, and `pace.py`, where they differ.

`coordinator/client/{connection,coordinator,policies,run,updates,workers}.py` are made from the files here of the same
names by `python tests/client/generate.py`, which takes `async`, `await` and `Async` away, and from docstrings each
paragraph that speaks of the event loop. To add a call, write it here and run that.
"""
