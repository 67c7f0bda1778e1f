"""``cloister local``: the service, the reconciler, Postgres and Ray in the foreground over one data directory.

    cloister local ──┬── postgres          embedded, on a Unix socket
      (supervisor)   ├── ray start --head  the Jobs API on 127.0.0.1
                     ├── service.api
                     ├── service.reconciler
                     └── guard             ends all of the above when the supervisor dies

``stack`` starts them in order, ``supervisor`` restarts what died, ``processes`` and ``guard`` make
sure that nothing stays behind.
"""
