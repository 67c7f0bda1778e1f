"""The data services of a stack: Postgres and the object store."""
