"""The process that takes batches from state to state: validates, launches, watches, assembles.

One reconciler works at a time; others wait for its lock. Every step can be repeated: kill it anywhere, start it again.
"""
