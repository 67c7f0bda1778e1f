-- The database, the role that owns it and the role of the service, created if they are missing. The passwords are set at
-- each start, so that a changed one takes effect. Run by psql, as the superuser, with the variables database, owner and
-- service. The migrations grant the service's role what it needs.

\set owner_password `cat "$PASSWORDS/owner"`
\set service_password `cat "$PASSWORDS/service"`

SELECT format('CREATE ROLE %I LOGIN', role) FROM unnest(ARRAY[:'owner', :'service']) AS role
WHERE role NOT IN (SELECT rolname FROM pg_roles)
\gexec

ALTER ROLE :"owner" PASSWORD :'owner_password';
ALTER ROLE :"service" PASSWORD :'service_password';

SELECT format('CREATE DATABASE %I OWNER %I', :'database', :'owner')
WHERE :'database' NOT IN (SELECT datname FROM pg_database)
\gexec

REVOKE ALL ON DATABASE :"database", postgres, template1 FROM PUBLIC;
-- The migrations grant this too, but a restored dump lacks it.
GRANT CONNECT ON DATABASE :"database" TO :"service";
