"""``cloister local``: API, reconciler, coordinator, Postgres and Ray in the foreground, on one data directory.

    cloister local ──┬── postgres          embedded, on a Unix socket
      (supervisor)   ├── ray start --head  the Jobs API on 127.0.0.1
                     ├── service.api
                     ├── service.reconciler
                     ├── service.coordinator   jobs lease their work there
                     └── guard             ends all of the above if the supervisor dies

``stack`` starts them in order and ``supervisor`` restarts those that die. ``processes`` and ``guard`` leave no process
behind. ``layout`` has the paths, the lock and the checks that keep other users of the machine out.
"""
