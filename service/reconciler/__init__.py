"""The reconciler: validates input files, starts and watches jobs, assembles results and sets the states of batches.

    __main__ ─▶ loop ─▶ steps ─┬▶ transitions      decides the next action (pure, in service/transitions.py)
                 │             ├▶ finishing        assembles the result files
                 │             ├▶ state_changes    the only writes of batches.status
                 │             └▶ records          all other reads and writes of batches
                 ├▶ retention                      deletes expired files and old batches
                 └▶ webhooks                       delivers webhooks

One reconciler leads at a time; the others wait for its lock. Every step can be repeated, so the process can be killed
at any point and started again.
"""
