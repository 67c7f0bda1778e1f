"""Deterministic simulation of the control plane: many short histories of the real code, each from one seed.

    __main__ ─▶ histories ─▶ history ─┬▶ scheduler   decides who acts next, and which call fails
                                      ├▶ reconciler  leaders, of which one may have lost its lock
                                      ├▶ jobs        drivers that lease, run, write and commit
                                      ├▶ ports       the object store and the launcher, with faults
                                      ├▶ database    Postgres with virtual time, and with faults at commits
                                      └▶ checks      the rules that every history must keep

See docs/simulation.md.
"""
