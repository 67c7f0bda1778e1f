-- The database and its two roles, made where they are missing; the passwords are set anew each time, so that a
-- changed one takes effect. Run by psql, as the superuser, with the variables database, owner and job.

\set owner_password `cat "$PASSWORDS/owner"`
\set job_password `cat "$PASSWORDS/job"`

SELECT format('CREATE ROLE %I LOGIN', role)
FROM unnest(ARRAY[:'owner', :'job']) AS role
WHERE role NOT IN (SELECT rolname FROM pg_roles)
\gexec

ALTER ROLE :"owner" PASSWORD :'owner_password';
ALTER ROLE :"job" PASSWORD :'job_password';

SELECT format('CREATE DATABASE %I OWNER %I', :'database', :'owner')
WHERE :'database' NOT IN (SELECT datname FROM pg_database)
\gexec

REVOKE ALL ON DATABASE :"database", postgres, template1 FROM PUBLIC;
GRANT CONNECT ON DATABASE :"database" TO :"job";
