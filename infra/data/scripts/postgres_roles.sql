-- The database and the role that owns it, created if they are missing. The password is set at each start, so that a
-- changed one takes effect. Run by psql, as the superuser, with the variables database and owner.

\set owner_password `cat "$PASSWORDS/owner"`

SELECT format('CREATE ROLE %I LOGIN', :'owner')
WHERE :'owner' NOT IN (SELECT rolname FROM pg_roles)
\gexec

ALTER ROLE :"owner" PASSWORD :'owner_password';

SELECT format('CREATE DATABASE %I OWNER %I', :'database', :'owner')
WHERE :'database' NOT IN (SELECT datname FROM pg_database)
\gexec

REVOKE ALL ON DATABASE :"database", postgres, template1 FROM PUBLIC;
