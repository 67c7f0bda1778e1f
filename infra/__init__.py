"""The Pulumi program that deploys cloister: one stack for each customer and environment.

Nothing happens at import. ``infra.stack.deploy`` makes every resource of a stack; ``infra.__main__`` reads the stack
file, calls it and exports what it gives.
"""
