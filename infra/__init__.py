"""The Pulumi program that deploys cloister: one stack for each customer and environment.

Imports have no side effects. ``infra.program.deploy`` creates all resources of a stack; ``infra.__main__`` runs the
program for the Pulumi CLI.
"""
