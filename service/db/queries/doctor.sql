-- name: doctor_job_role_missing
SELECT 'LOGIN' FROM pg_roles WHERE rolname = %(role)s AND NOT rolcanlogin
UNION ALL
SELECT 'CONNECT to the database' WHERE NOT has_database_privilege(%(role)s, current_database(), 'CONNECT')
UNION ALL
SELECT 'USAGE of the schema public' WHERE NOT has_schema_privilege(%(role)s, 'public', 'USAGE')
UNION ALL
SELECT 'EXECUTE of the function report_progress' WHERE NOT (
    SELECT coalesce(bool_and(has_function_privilege(%(role)s, oid, 'EXECUTE')), false)
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname = 'report_progress'
)

-- name: doctor_job_role_excess
SELECT 'the role is a ' || attribute
FROM pg_roles, LATERAL (VALUES
    ('superuser', rolsuper), ('CREATEROLE', rolcreaterole), ('CREATEDB', rolcreatedb),
    ('REPLICATION', rolreplication), ('BYPASSRLS', rolbypassrls)
) AS attributes (attribute, has) WHERE rolname = %(role)s AND has
UNION ALL
SELECT 'member of ' || groups.rolname
FROM pg_auth_members JOIN pg_roles AS groups ON groups.oid = roleid JOIN pg_roles AS members ON members.oid = member
WHERE members.rolname = %(role)s
UNION ALL
SELECT 'CREATE in the schema public' WHERE has_schema_privilege(%(role)s, 'public', 'CREATE')
UNION ALL
SELECT 'CREATE in the database' WHERE has_database_privilege(%(role)s, current_database(), 'CREATE')
UNION ALL
SELECT 'table ' || relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
    AND (has_table_privilege(%(role)s, oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')
         OR has_any_column_privilege(%(role)s, oid, 'SELECT, INSERT, UPDATE'))
UNION ALL
-- Functions that run with the permissions of their owner.
SELECT 'function ' || proname FROM pg_proc
WHERE pronamespace = 'public'::regnamespace AND prosecdef AND proname <> 'report_progress'
    AND has_function_privilege(%(role)s, oid, 'EXECUTE')
